"""The job file: every setting a user can write, documented where it is defined."""

from slipstream.job.file import JobError, check_job, load_job, locate, read_job
from slipstream.job.job import Job, dump, total_samples

__all__ = ["Job", "JobError", "check_job", "dump", "load_job", "locate", "read_job", "total_samples"]
