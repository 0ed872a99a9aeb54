"""`slipstream schema`: the JSON schema of the job file, for editors."""

import json


def command() -> None:
    """Print the JSON schema of the job file, so that editors complete it."""
    from slipstream.job import Job

    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}, indent=2))
