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

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        name = folder.path.resolve().name
        options: dict[str, Any] = {
            "project": project,
            "name": name,
            "id": name,
            "resume": "allow",
            "dir": str(folder.path),
        }
        self._run = wandb.init(config=dict(config), **options)

    def write(self, record: Record) -> None:
        """Add the numbers of a record."""
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        """Wait until all is there."""
        self._run.finish()


class MlflowLog:
    """Records in MLflow, in the experiment `recurra` of MLFLOW_TRACKING_URI or, without it, in the run's folder.

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
        name = folder.path.resolve().name
        found = self._client.search_runs([number], f"attributes.run_name = '{name}'", max_results=1)
        self._run = (found[0] if found else self._client.create_run(number, run_name=name)).info.run_id
        if not found:
            for section, values in config.items():
                self._client.log_param(self._run, section, str(values)[:500])

    def write(self, record: Record) -> None:
        """Add the numbers of a record."""
        for name, value in record.items():
            if name != "step":
                self._client.log_metric(self._run, name, float(value), step=record["step"])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


LOGGERS: dict[str, Callable[[RunFolder, Mapping[str, Any]], MetricLog]] = {"wandb": WandbLog, "mlflow": MlflowLog}
