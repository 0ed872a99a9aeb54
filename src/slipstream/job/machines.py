"""The section `machines` of a job file: where it runs. What is said of one fleet matters there alone."""

from typing import Literal

from pydantic import Field, model_validator

from slipstream.job.base import Section, refuse
from slipstream.job.units import Bytes, Count, CountOrZero, Duration, Money


class Slurm(Section):
    """How Slurm is asked for machines."""

    partition: str | None = None
    """Default: the cluster's own."""
    account: str | None = None
    """Who is charged."""
    qos: str | None = None
    """Quality of service."""
    gres: str | None = None
    """Generic resources of each machine, such as `gpu:a100:4`. Default: `gpu:N` for the GPUs that are used."""
    constraint: str | None = None
    """Features that nodes must have."""
    time: Duration | None = None
    """Time limit. Before its end the run saves itself and is queued again. Default: limits.deadline, else the
    partition's."""
    warning: Duration = 120.0
    """How long before the time limit the run is told to save itself."""
    setup: tuple[str, ...] = ()
    """Lines of shell before it starts: `module load cuda`, `source …/activate`."""

    @model_validator(mode="after")
    def _check(self) -> "Slurm":
        if self.time is not None and self.warning >= self.time:
            times = f"warning ({self.warning:.0f} s) must be shorter than time ({self.time:.0f} s)"
            refuse([f"{times}, or the run could not begin"])
        return self


class Ray(Section):
    """How a Ray cluster is asked for machines."""

    address: str = "auto"
    """Of the cluster's dashboard, `http://host:8265`; `ray://host:10001` and `host:6379` stand for that, too. auto:
    what RAY_ADDRESS says, else a cluster that runs on this machine, else one that is started for this run alone."""
    python: str | None = None
    """Python on the cluster's head. Default: the one you submit with, if it is there, too; else `python`."""
    environment: tuple[str, ...] = ()
    """Names of variables that travel with the job from where you submit it, such as AWS_ACCESS_KEY_ID. Who may see the
    cluster's jobs sees what they hold."""


class Tpu(Section):
    """TPUs, which GKE has."""

    accelerator: str
    """GKE's name of their kind: `tpu-v5-lite-podslice`, …"""
    topology: str
    """How a slice is wired: `2x4`, …"""
    chips: Count
    """Of each machine."""


class Kubernetes(Section):
    """How a Kubernetes cluster is asked for machines: one pod is one machine."""

    image: str | None = None
    """The container image, with slipstream in it; `container/Dockerfile` makes one. Needed."""
    claim: str | None = None
    """A volume claim that all pods can write to at once (ReadWriteMany): the run folder is in it. Needed."""
    mount: str | None = None
    """The folder where that volume is, in the pods and on this machine alike: the run folder is below it. Needed."""
    context: str | None = None
    """Which cluster of the kubeconfig. Default: its current one."""
    namespace: str | None = None
    """Default: the context's, else `default`."""
    service_account: str | None = None
    """Whose rights the pods have. Default: the namespace's."""
    pull_secret: str | None = None
    """The secret with which the image is pulled."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become variables of the environment: access keys of object storage, …"""
    provider: Literal["gke", "eks", "aks"] | None = None
    """Whose cluster it is: spot, autoscaling and TPUs have other labels on each."""
    spot: bool | None = None
    """Only nodes that may be taken away, which cost less. Default: with autoscaling as in the plan, else any nodes."""
    autoscaling: bool = False
    """The cluster adds nodes for pods that wait: it is asked for the machine that the plan (`--plan`) names, and what
    it has now is no limit."""
    gpu: str = "nvidia.com/gpu"
    """What the cluster calls its GPUs: AMD's are amd.com/gpu."""
    tpu: Tpu | None = None
    """TPUs for each pod, for programs that compute on them."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerate: tuple[str, ...] = ()
    """Taints of nodes, by their keys, that are no hindrance."""
    memory: Bytes | None = None
    """Main memory for each pod, and the most that it may have. Default: what the node has left."""
    shared_memory: Bytes | None = None
    """The most that workers may share in /dev/shm. Default: half of the node's memory."""
    queue: str | None = None
    """A local queue of Kueue, which starts all pods of a run or none."""
    user: CountOrZero | None = None
    """The number of the user that pods run as. Default: who submits, whose the run folder is."""
    restarts: CountOrZero = 10
    """How often a run that has failed is started again. Pods that are evicted or preempted do not count."""
    grace: Duration = 120.0
    """How long a pod that must go has for its last checkpoint."""

    @model_validator(mode="after")
    def _check(self) -> "Kubernetes":
        problems = [
            f"{key} needs provider: nodes have other labels with each"
            for key in ("spot", "autoscaling")
            if getattr(self, key) and not self.provider
        ]
        if self.tpu and self.provider != "gke":
            problems.append("tpu needs provider: gke, which alone has TPUs")
        if (self.claim is None) != (self.mount is None):
            problems.append("claim and mount belong together: the volume, and where it is")
        if self.mount is not None and not self.mount.startswith("/"):
            problems.append(f"mount must be a whole path, from / on, and is {self.mount!r}")
        refuse(problems)
        return self


class SkyPilot(Section):
    """How SkyPilot is asked to rent machines. What is rented is in the plan (`--plan`)."""

    image: str | None = None
    """The container image, with slipstream in it; `container/Dockerfile` makes one. Where there is none, as on clouds
    that take no images, `setup` must install slipstream."""
    shared: str | None = None
    """The folder that every machine and this one see alike, such as an NFS export which `setup` mounts: the run folder
    is below it. Needed."""
    volume: str | None = None
    """A volume of SkyPilot's (`sky volumes`) that is mounted there; where there is none, `setup` must do it."""
    setup: tuple[str, ...] = ()
    """Lines of shell on every machine before it starts."""
    secrets: tuple[str, ...] = ()
    """Variables of the environment here that the machines get too, and SkyPilot does not show: access keys, …"""
    disk: Bytes | None = None
    """Each machine's own disk. Default: SkyPilot's, 256 GB."""
    restarts: CountOrZero = 10
    """How often a run that has failed is started again. Machines that are taken away do not count."""

    @model_validator(mode="after")
    def _check(self) -> "SkyPilot":
        problems = []
        if self.volume and not self.shared:
            problems.append("volume needs shared: where it is mounted")
        if self.shared is not None and not self.shared.startswith("/"):
            problems.append(f"shared must be a whole path, from / on, and is {self.shared!r}")
        refuse(problems)
        return self


class Machines(Section):
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if there are any."""
    price_per_hour: Money | None = None
    """What this machine costs in an hour; the run then shows its cost."""
    count: Count | None = None
    """How many machines `submit` asks a fleet for. Default: those of the plan, else one."""
    store: str | None = Field(default=None, pattern=r"^(s3|gs|az)://[^/]+")
    """Where runs on a fleet have their folders if its machines share no disk: an address in object storage, such as
    s3://bucket/runs. Each run gets a folder of its own below it."""
    slurm: Slurm = Field(default_factory=Slurm)
    """How Slurm is asked."""
    ray: Ray = Field(default_factory=Ray)
    """How Ray is asked."""
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    """How Kubernetes is asked."""
    skypilot: SkyPilot = Field(default_factory=SkyPilot)
    """How SkyPilot is asked."""
