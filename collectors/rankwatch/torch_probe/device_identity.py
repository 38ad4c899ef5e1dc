"""What a rank says of the device that holds its parameters: the type, and the UUID that the driver knows it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

ON_HOST: Final = frozenset({"cpu", "meta"})
"""Types of torch devices that are no accelerator."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_UNKNOWN: Final = "00000000-0000-0000-0000-000000000000"


def describe_device(
    home: torch.device, known_uuid: str, env: Mapping[str, str], failed: Callable[[Exception], None]
) -> dict[str, str]:
    """The fields `device_type` and `device_uuid` of a rank's identity; the latter only if it is new.

    Waits for no device, and initializes none: parameters lie there already.

    Args:
        home: the device of the parameters.
        known_uuid: what the script or the launcher said; it stays. Else the driver is asked.
        env: the process's environment. An instance of a divided device (MIG) that it lists is what it is known by:
            what the driver then reports may be the whole device.
        failed: gets what this raises.
    """
    told = {"device_type": home.type}
    if home.type != "cuda" or known_uuid:
        return told
    try:
        uuid = _listed_instance(home, env) or _uuid(torch.cuda.get_device_properties(home))
    except Exception as error:  # noqa: BLE001 -- a driver or a build of torch that is not known
        failed(error)
        return told
    return told | ({"device_uuid": uuid} if uuid else {})


def _listed_instance(home: torch.device, env: Mapping[str, str]) -> str:
    listed = env.get(VISIBLE, "").split(",")
    named = listed[home.index].strip() if home.index is not None and home.index < len(listed) else ""
    return named if named.startswith("MIG-") else ""


def _uuid(properties: Any) -> str:
    """As NVML writes it; on ROCm, whose ids have another form, as torch gives it; "" where there is none."""
    text = str(getattr(properties, "uuid", None) or _UNKNOWN)
    if text == _UNKNOWN:
        return ""
    return text if torch.version.hip or text.startswith("GPU-") else f"GPU-{text}"
