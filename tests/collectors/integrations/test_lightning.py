"""What one line sees of Lightning's Trainer and of Fabric, and what it has them do."""

from __future__ import annotations

import pickle
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rankwatch
from rankwatch.integrations.lightning import _blank
from tests.support.ranks.gloo import Framework
from tests.support.ranks.ordered import STEP_S

Framework("lightning")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

BATCHES = 8
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def until_saved() -> Any:
    """A callback that gives an order time; a save ends the training."""

    class UntilSaved(import_module(PACKAGES[0]).Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(STEP_S)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            trainer.should_stop = True

    return UntilSaved()


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(4 * BATCHES, 4)), batch_size=4)


def a_module(package: str = PACKAGES[0], *, manual: bool = False) -> Any:
    lightning = pytest.importorskip(package)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.one, self.other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = (self.one(batch[0]) + self.other(batch[0])).square().mean()
            self.losses.append(float(loss))
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
                return {"loss": loss}
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.one(batch[0])

        def configure_optimizers(self) -> Any:
            if manual:
                return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.one, self.other)]
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def a_trainer(steps: int, package: str = PACKAGES[0], **arguments: Any) -> Any:
    settled = {"enable_checkpointing": False, "logger": False, "limit_val_batches": 0, **arguments}
    return import_module(package).Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="out",
        **settled,
    )


def trained(recorded: Any, trainer: Any, module: Any, *more: Any, **how: Any) -> None:
    watch = rankwatch.lightning(trainer, **recorded.options).watch
    trainer.fit(module, loader(), *more, **how)
    assert watch.errors == 0, watch.last_error
    watch.close()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_step_has_its_loss_learning_rate_norm_and_the_wait_for_its_batches(recorded, package):
    module = a_module(package)
    trained(recorded, a_trainer(10, package), module)
    assert [step.step for step in recorded.steps] == list(range(10))
    assert recorded.values("loss") == pytest.approx(module.losses)
    assert recorded.values("learning_rate") == [0.01] * 10
    assert all(norm > 0 for norm in recorded.values("grad_norm"))
    assert all({"data_wait", "optimizer"} <= set(step.phases) for step in recorded.steps)


def test_accumulated_batches_are_one_step_with_the_mean_of_their_losses(recorded):
    module = a_module()
    trained(recorded, a_trainer(4, accumulate_grad_batches=2), module)
    assert [step.step for step in recorded.steps] == list(range(4))
    means = [(first + second) / 2 for first, second in zip(module.losses[::2], module.losses[1::2], strict=True)]
    assert recorded.values("loss") == pytest.approx(means)


def test_in_manual_optimization_a_batch_whose_optimizers_step_is_one_step(recorded):
    module = a_module(manual=True)
    trained(recorded, a_trainer(12), module)
    assert [step.step for step in recorded.steps] == list(range(6))
    assert recorded.values("loss") == pytest.approx(module.losses)


def test_validations_lie_between_steps_also_within_an_epoch(recorded):
    trained(recorded, a_trainer(8, limit_val_batches=2, val_check_interval=4), a_module(), loader())
    assert [step.kind for step in recorded.steps] == [0] * 8
    assert all("eval" not in step.phases for step in recorded.steps)


def test_a_validation_amid_accumulated_batches_makes_a_step_that_is_not_compared(recorded):
    trainer = a_trainer(4, limit_val_batches=2, val_check_interval=3, accumulate_grad_batches=2)
    trained(recorded, trainer, a_module(), loader())
    assert [step.kind for step in recorded.steps] == [0, 1, 0, 0]


def test_saves_are_registered_when_they_are_whole_and_gone_when_deleted(recorded, tmp_path):
    lightning = import_module(PACKAGES[0])
    saves = lightning.callbacks.ModelCheckpoint(dirpath="saves", filename="{step}", every_n_train_steps=2, save_top_k=1)
    trained(recorded, a_trainer(6, enable_checkpointing=True, callbacks=[saves]), a_module())
    saved = recorded.notes("checkpoint_saved")
    assert [(one["step"], one["location"]) for one in saved] == [
        (step, str(tmp_path / "saves" / f"step={step}.ckpt")) for step in (2, 4, 6)
    ]
    assert all(one["bytes"] > 0 for one in saved)
    assert [one["checkpoint"] for one in recorded.notes("checkpoint_gone")] == ["local:l.0:2"]
    assert [step.kind for step in recorded.steps] == [0] * 6


def test_a_save_and_a_resume_that_fail_are_reported(recorded, tmp_path):
    trainer, module, path = a_trainer(2), a_module(), tmp_path / "taken" / "one.ckpt"
    rankwatch.lightning(trainer, **recorded.options)
    trainer.fit(module, loader())
    (tmp_path / "taken").write_text("a file in place of its folder")
    with pytest.raises((OSError, RuntimeError)):
        trainer.save_checkpoint(path)
    with pytest.raises((OSError, RuntimeError)):
        trainer.fit(module, loader(), ckpt_path=str(path))
    save, load = recorded.notes("checkpoint_failed")
    assert (save["what"], save["location"]) == ("save", str(path))
    assert (load["what"], load["location"]) == ("restore", str(path))


def test_a_further_training_is_numbered_on(recorded):
    trainer, module = a_trainer(4), a_module()
    watch = rankwatch.lightning(trainer, **recorded.options).watch
    trainer.fit(module, loader())
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(module, loader())
    watch.close()
    assert [step.step for step in recorded.steps] == list(range(7))
    assert [one["reason"] for one in recorded.notes("rank_left")] == ["end", "end"]


def test_a_stop_ends_the_training_before_its_least_epochs(recorded):
    ordered = recorded.order("stop", after_step=2)
    trainer = a_trainer(-1, max_epochs=100_000, min_epochs=50_000, callbacks=[until_saved()])
    trained(recorded, trainer, a_module())
    ordered.result()
    assert trainer.global_step == len(recorded.steps) < 100_000
    assert [one["reason"] for one in recorded.notes("rank_left")] == ["stop"]


def test_an_ordered_checkpoint_is_saved_and_after_a_relaunch_training_goes_on_from_it(recorded):
    ordered = recorded.order("checkpoint", after_step=2)
    trained(recorded, a_trainer(100_000, callbacks=[until_saved()]), a_module())
    ordered.result()
    (saved,) = recorded.notes("checkpoint_saved")
    assert saved["step"] == len(recorded.steps)

    recorded.relaunched(Path(saved["location"]), saved["step"])
    recorded.options["env"]["RANKWATCH_LAUNCH"] = "m"
    trained(recorded, a_trainer(saved["step"] + 3), a_module())
    assert [step.step for step in recorded.steps][-3:] == [saved["step"] + more for more in range(3)]
    assert [one["checkpoint"] for one in recorded.notes("checkpoint_loaded")] == [f"local:l.0:{saved['step']}"]


def test_a_job_is_named_after_its_logger_or_its_folder(recorded):
    lightning = import_module(PACKAGES[0])
    options = recorded.options | {"job": None}
    logger = lightning.loggers.CSVLogger(".", name="tiny net")
    assert rankwatch.lightning(a_trainer(1, logger=logger), **options).watch.identity.job == "tiny net"
    assert rankwatch.lightning(a_trainer(1), **options).watch.identity.job == "out"


def test_a_trainer_that_has_not_begun_can_be_handed_to_another_process():
    trainer = a_trainer(1)
    callback = _blank(PACKAGES[0])
    callback.attach(trainer, PACKAGES[0], {"job": "j"})
    trainer.callbacks.insert(0, callback)
    copied = pickle.loads(pickle.dumps(trainer))
    assert copied.callbacks[0]._options == {"job": "j"}
    assert copied.callbacks[0]._trainer is copied


def test_what_is_no_trainer_is_refused(recorded):
    with pytest.raises(TypeError, match="Trainer, not Linear"):
        rankwatch.lightning(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="Fabric, not Linear"):
        rankwatch.fabric(torch.nn.Linear(1, 1))


def test_fabric_records_the_steps_of_its_optimizer_and_what_it_saves(recorded):
    fabric = import_module("lightning").Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    watch = rankwatch.fabric(fabric, **recorded.options)
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for step in range(5):
        fabric.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            fabric.save("out/four.pt", {"model": model})
    watch.close()
    assert watch.errors == 0, watch.last_error
    assert [step.step for step in recorded.steps] == [1, 2, 3, 4]
    assert all(step.values["loss"] > 0 and step.values["grad_norm"] > 0 for step in recorded.steps)
    (saved,) = recorded.notes("checkpoint_saved")
    assert saved["step"] == 4
    assert Path(saved["location"]).is_file()
