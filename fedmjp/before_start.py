"""What is checked of a run before anything is written: options, data, weights, device, and whether attacks fit them."""

from __future__ import annotations

from attacks import UsageError
from fedmjp.audit.suite import active_attack
from fedmjp.client import ClientTask, shared_task
from fedmjp.config import RunConfig


def check_before_start(config: RunConfig) -> list[str]:
    """Build what every federation needs, so that a mistake shows before anything is written.

    Returns:
        What the defences prove for their federations, in words (`Defense.guarantee`).

    Raises:
        UsageError: unknown or missing data, weights, device; fewer images than clients.
    """
    config.validate()
    active = active_attack(config.audit.named(), config.attack_settings())
    if active and active[1].single_out and not config.audit.secure_aggregation:
        raise UsageError(
            f"{active[0]}.single_out takes a client out of a sum: pass --secure-aggregation NUMBER as well"
        )
    guarantees = []
    for defense in config.defense:
        task = shared_task(config.order(), defense, config.client_entropy())
        if len(task.data.test) == 0:
            raise UsageError(f"--data {config.data.data} has no test images")
        guarantees.append(task.guarantee)
    return list(filter(None, guarantees))


def check_resumable(task: ClientTask, defense: str, number: int, *, kept: bool = False, simulated: bool) -> None:
    """Check that an interrupted federation can go on.

    Args:
        task: of its clients.
        defense: entry of its defence.
        number: of the round that comes next.
        kept: what the clients keep is in the run's folder.
        simulated: the clients draw again what they would have drawn without the interruption; nodes do not.

    Raises:
        UsageError: what the clients keep for the next round is not there (that of nodes ends with the run), or a
            guarantee counts on one walk over the nodes' images.
    """
    if task.clients_keep and not kept:
        cause = f"--defense {defense}" if task.defense.remembers else f"--objective {task.objective_name}"
        raise UsageError(
            f"round {number} needs what each client keeps under {cause}, which is not in the folder of the interrupted "
            "run; start again in another --out"
        )
    if task.guarantee and not simulated:
        raise UsageError(
            f"nodes walk over their images anew from round {number} on, so that the epsilon of --defense {defense} "
            "would not hold; start again in another --out"
        )
