"""A typed client of the REST API, for scripts and notebooks. Needs msgspec, which the package always brings.

from rankwatch.client import Client

client = Client()  # the service of `rankwatch login`, else the one that `rankwatch up` started for this user
for incident in client.incidents.list(state="unresolved", severity="critical"):
    print(incident.job, incident.summary)
"""

from rankwatch.client.client import (
    Client,
    Command,
    Incident,
    IncidentChange,
    IncidentDetail,
    Job,
    JobDetail,
    PersonFeedback,
    Receiver,
    Silence,
    Transition,
)
from rankwatch.client.connection import RestError

__all__ = [
    "Client",
    "Command",
    "Incident",
    "IncidentChange",
    "IncidentDetail",
    "Job",
    "JobDetail",
    "PersonFeedback",
    "Receiver",
    "RestError",
    "Silence",
    "Transition",
]
