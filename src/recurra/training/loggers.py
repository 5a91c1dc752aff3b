"""Records of a run in Weights & Biases and MLflow, by their own packages."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from recurra.training.metrics import MetricLog, Record
from recurra.training.run_folder import RunFolder

PROJECT = "recurra"


class WandbLog:
    """Records in Weights & Biases. A resumed run continues its page there.

    WANDB_PROJECT, WANDB_MODE and what else the package reads from the environment hold here too.

    Args:
        folder: of the run; its name is the run's there, and its files lie in it.
        config: the experiment as plain data.
    """

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        import wandb

        known = folder.read_tracked("wandb")
        self._run = wandb.init(
            config=dict(config),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.path.resolve().name,
            id=known,
            resume="allow",
            dir=str(folder.path),
        )
        if self._run.id != known:
            folder.write_tracked("wandb", self._run.id)

    def write(self, record: Record) -> None:
        """Add the numbers of a record."""
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        """Wait until all is there."""
        self._run.finish()


class MlflowLog:
    """Records in MLflow, in the experiment `recurra` of MLFLOW_TRACKING_URI or, without it, in the run's folder.

    A resumed run continues its own there. The steps that it repeats keep their first records.

    Args:
        folder: of the run; its name is the run's there.
        config: the experiment as plain data.
    """

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.path.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=where)
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        self._run, self._last_step = self._continued(folder.read_tracked("mlflow"))
        if not self._run:
            self._run = self._client.create_run(number, run_name=folder.path.resolve().name).info.run_id
            folder.write_tracked("mlflow", self._run)
            for section, values in config.items():
                self._client.log_param(self._run, section, str(values)[:500])

    def _continued(self, number: str | None) -> tuple[str, int]:
        """Open a run again, and return its number and last step; "" and -1 if the server has none of that number."""
        from mlflow.exceptions import MlflowException

        if number is None:
            return "", -1
        try:
            names = self._client.get_run(number).data.metrics
        except MlflowException:
            return "", -1
        self._client.update_run(number, status="RUNNING")
        points = (point for name in names for point in self._client.get_metric_history(number, name))
        return number, max((point.step for point in points), default=-1)

    def write(self, record: Record) -> None:
        """Add the numbers of a record, unless it repeats one."""
        if record["step"] <= self._last_step:
            return
        for name, value in record.items():
            if name != "step":
                self._client.log_metric(self._run, name, float(value), step=record["step"])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


LOGGERS: dict[str, Callable[[RunFolder, Mapping[str, Any]], MetricLog]] = {"wandb": WandbLog, "mlflow": MlflowLog}
