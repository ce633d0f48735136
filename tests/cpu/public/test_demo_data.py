"""The demo workloads: their data is there without a download, is split cleanly, and their losses fall."""

import pytest
import torch

# Both are optional extras of the package.
L = pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from examples import chargpt, digits  # noqa: E402


class Losses(L.Callback):
    """Keeps the loss of each training step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def fit(task, data, **limits):
    """Train on a plain Trainer; returns the losses of all steps and the metrics last logged."""
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
        **limits,
    )
    torch.manual_seed(0)
    trainer.fit(task, datamodule=data)
    return losses.values, trainer.callback_metrics


def test_text_round_trips_through_the_vocabulary():
    text = chargpt.stdlib_text()
    assert 0 < len(text) <= chargpt.TEXT_NCHARS
    assert "import" in text[:5000]
    ids = chargpt.encode(text)
    known = "".join(c if c in chargpt.CHARACTERS else chargpt.UNKNOWN_MARK for c in text)
    assert chargpt.decode(ids) == known
    assert (ids == chargpt.UNKNOWN).float().mean() < 0.001


def test_vocabulary_has_one_id_per_character():
    assert chargpt.VOCABULARY_SIZE == len(set(chargpt.CHARACTERS)) + 1 == 100
    assert chargpt.encode(chargpt.CHARACTERS).tolist() == list(range(99))
    assert chargpt.encode("a\0é\N{SNOWMAN}z").tolist()[1:4] == [chargpt.UNKNOWN] * 3


def test_text_is_cut_once():
    train, held_out = chargpt.split_text()
    assert torch.equal(torch.cat([train, held_out]), chargpt.encode(chargpt.stdlib_text()))
    assert len(held_out) == pytest.approx(chargpt.HELD_OUT_SHARE * (len(train) + len(held_out)), abs=1)


def test_windows_are_side_by_side_and_targets_one_ahead():
    windows = chargpt.Windows(torch.arange(11, dtype=torch.uint8), context=5)
    assert [(x.tolist(), y.tolist()) for x, y in windows] == [
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10]),
    ]


def test_network_sees_no_later_character():
    model = chargpt.build_model(0, chargpt.CharGPTSettings.quick()).eval()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 5] = 7
    same = torch.isclose(model(tokens), model(changed), atol=1e-6).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_digits_splits_are_disjoint_and_complete():
    train, held_out = (set(rows.tolist()) for rows in digits.split_indices())
    assert not train & held_out
    assert train | held_out == set(range(1797))
    assert len(held_out) == digits.HELD_OUT_COUNT


@pytest.mark.parametrize(
    ("module", "settings"), [(chargpt, chargpt.CharGPTSettings.quick()), (digits, digits.DigitsSettings.quick())]
)
def test_a_seed_fixes_weights_and_batches_and_spares_the_global_generator(module, settings):
    before = torch.get_rng_state()
    first, second = module.build(3, settings), module.build(3, settings)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    for a, b in zip(next(iter(first.train_loader)), next(iter(second.train_loader)), strict=True):
        assert torch.equal(a, b)
    other = module.build(4, settings)
    assert not torch.equal(next(iter(first.train_loader))[0], next(iter(other.train_loader))[0])


def test_quick_chargpt_learns():
    settings = chargpt.CharGPTSettings.quick()
    losses, metrics = fit(
        chargpt.task(settings),
        chargpt.data(settings),
        max_steps=settings.steps,
        val_check_interval=settings.steps,
    )
    assert losses[0] == pytest.approx(4.6, abs=0.3)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert metrics["val_loss"] < losses[0] - 0.5


def test_quick_digits_learns():
    settings = digits.DigitsSettings.quick()
    losses, metrics = fit(digits.task(settings), digits.data(settings), max_epochs=settings.epochs)
    assert sum(losses[-5:]) / 5 < losses[0] / 2
    assert metrics["val_acc"] > 0.3


def test_plain_torch_step_lowers_the_loss():
    workload = digits.build(0, digits.DigitsSettings.quick())
    optimizer = workload.make_optimizer(workload.model)
    batch = next(iter(workload.train_loader))
    losses = []
    for _ in range(5):
        loss = digits.loss_of(workload.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
