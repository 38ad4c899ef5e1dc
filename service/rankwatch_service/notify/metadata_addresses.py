"""Where clouds tell a machine its credentials, outside of the link-local ranges, which are refused as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

METADATA: Final[Mapping[IPv4Address | IPv6Address, str]] = {
    ip_address(address): source
    for address, source in (
        ("fd00:ec2::254", "AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html"),
        ("fd20:ce::254", "Google Cloud: cloud.google.com/compute/docs/metadata/querying-metadata"),
        ("168.63.129.16", "Azure: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16"),
        ("192.0.0.192", "Oracle Cloud Classic: docs.oracle.com/en/cloud/iaas/compute-iaas-cloud"),
        ("fd00:c1::a9fe:a9fe", "Oracle Cloud: docs.oracle.com/iaas/Content/Compute/Tasks/gettingmetadata.htm"),
        ("100.100.100.200", "Alibaba Cloud: alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata"),
    )
}
"""Address -> cloud and page that names it. They are refused in every form, whatever is allowed."""
