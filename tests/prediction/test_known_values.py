"""What a step asks of its batch is answered as in the real step; all else is guessed and noted."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.prediction.fake import values as known_values
from lightning_memsave.prediction.fake.tensors import FakeTensors, clone_batch, fake_tensors
from lightning_memsave.prediction.fake.values import MAX_KNOWN_NUMEL, mark_placeholder

IDS = torch.tensor([[5, 3, 0], [7, 0, 0]])
FLAT = IDS.flatten()
MADE_UP = FLAT.clone()
mark_placeholder(MADE_UP)
FLOATS = torch.tensor([1.0, 2.0])
FEW = torch.zeros(MAX_KNOWN_NUMEL, dtype=torch.uint8)
MANY = torch.zeros(MAX_KNOWN_NUMEL + 1, dtype=torch.uint8)


@pytest.fixture
def fakes():
    with fake_tensors() as fakes:
        yield fakes


def ids_of(fakes: FakeTensors) -> Tensor:
    ids: Tensor = fakes.copy_batch(IDS)
    return ids


def here() -> int:
    """The line that calls."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


class TestKnown:
    def test_numbers_and_conditions(self, fakes):
        ids = ids_of(fakes)
        mask = ids != 0
        assert not mask.all()
        assert mask.any()
        assert mask.sum().item() == 3
        assert mask.sum(1).tolist() == [2, 1]
        assert int(ids.max()) == 7
        assert ids.float().mean().item() == 2.5
        assert fakes.guesses == ()

    def test_shapes_that_depend_on_them(self, fakes):
        ids = ids_of(fakes)
        mask = ids != 0
        hidden = torch.randn(2, 3, 4)
        assert mask.nonzero().shape == (3, 2)
        assert ids[mask].tolist() == [5, 3, 7]
        assert hidden[mask].shape == (3, 4)
        assert hidden.masked_select(mask[..., None]).shape == (12,)
        assert hidden[:, mask[0]].shape == (2, 2, 4)
        assert torch.where(mask)[0].tolist() == [0, 0, 1]
        assert ids.unique().tolist() == [0, 3, 5, 7]
        assert torch.bincount(ids.flatten()).shape == (8,)
        assert torch.repeat_interleave(torch.ones(2), mask.sum(1)).shape == (3,)
        assert fakes.guesses == ()

    def test_what_is_made_of_nothing(self, fakes):
        assert torch.arange(4).sum().item() == 6
        assert torch.tensor([1.5, 2.5]).tolist() == [1.5, 2.5]
        assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
        assert fakes.guesses == ()

    def test_memory_that_nobody_wrote_yet_is_zero(self, fakes):
        for _ in range(8):  # of which some has been written before
            with _disable_current_modes():
                torch.full((1000,), 7)
            assert torch.empty(1000, dtype=torch.long).sum().item() == 0
        assert fakes.guesses == ()

    def test_changes_in_place(self, fakes):
        ids = ids_of(fakes)
        ids.add_(1)
        ids[0, 0] = 9
        assert ids.tolist() == [[9, 4, 1], [8, 1, 1]]
        ids.masked_fill_(ids == 1, -100)
        assert (ids == -100).sum().item() == 3
        ids.zero_()
        assert ids.sum().item() == 0

    def test_views_and_what_they_are_views_of_change_together(self, fakes):
        ids = ids_of(fakes)
        row, flat = ids[1], ids.view(-1)
        row.fill_(2)
        assert flat.tolist() == [5, 3, 0, 2, 2, 2]
        ids.t().copy_(torch.arange(6).view(3, 2))
        assert row.tolist() == [1, 3, 5]

    def test_copies_are_apart(self, fakes):
        ids = ids_of(fakes)
        copy = ids.clone()
        copy.zero_()
        assert ids.sum().item() == 15

    def test_the_batch_itself_stays_as_it_is(self):
        batch = {"ids": IDS.clone()}
        with fake_tensors() as fakes:
            fakes.copy_batch(batch)["ids"].zero_()
        assert batch["ids"].equal(IDS)


class TestUnknown:
    def test_conditions_hold_and_numbers_are_one(self, fakes):
        x = torch.randn(2, 3)
        assert x.sum() > 5
        assert x.max().item() == 1.0
        assert x.long().max().item() == 1
        assert x.argmax().item() == 1

    def test_a_random_number_is_in_the_middle(self, fakes):
        """LayerDrop, as in OPT: its parts run."""
        assert not torch.rand([]) < 0.0
        line = here() - 1
        assert torch.rand(()).item() >= 0.1
        assert fakes.guesses[0] == (
            f"test_known_values.py, line {line}: a random number was assumed to be 0.5"
        )
        assert len(fakes.guesses) == 2

    def test_everything_is_chosen(self, fakes):
        x = torch.randn(4, 5)
        mask = x > 0
        assert mask.nonzero().shape == (20, 2)
        assert x[mask].shape == (20,)
        assert x.masked_select(mask).shape == (20,)
        assert x[mask[:, 0]].shape == (4, 5)
        assert x.masked_select(mask[:1]).shape == (20,)
        assert len(fakes.guesses) > 0

    def test_where_a_guess_was_made_is_noted_once(self, fakes):
        x = torch.randn(3)
        for _ in range(2):
            assert x.sum() > 0
        line = here() - 1
        (guess,) = fakes.guesses
        assert (
            guess
            == f"test_known_values.py, line {line}: a condition on data was assumed to be true"
        )
        x.sum().item()
        line = here() - 1
        what = "a value that depends on data was assumed to be 1"
        assert fakes.guesses[1] == f"test_known_values.py, line {line}: {what}"
        x[x > 0].sum()
        line = here() - 1
        assert fakes.guesses[2].startswith(f"test_known_values.py, line {line}: `aten.nonzero")

    def test_random_numbers(self, fakes):
        ids_of(fakes).random_(3).sum().item()
        torch.bernoulli(torch.tensor([0.5])).item()
        assert len(fakes.guesses) == 2

    def test_floats_of_the_batch(self, fakes):
        fakes.copy_batch(FLOATS).sum().item()
        assert len(fakes.guesses) == 1

    def test_what_follows_from_weights(self, fakes):
        embedding = nn.Embedding(10, 4)
        assert embedding(ids_of(fakes)).sum().item() == 1.0
        assert len(fakes.guesses) == 1

    def test_what_has_many_numbers(self, fakes):
        assert fakes.copy_batch(FEW)[0].item() == 0
        assert fakes.copy_batch(MANY)[0].item() == 1

    def test_known_numbers_that_unknown_ones_replace(self, fakes):
        ids = ids_of(fakes)
        ids.copy_(torch.randn(2, 3))
        assert ids.sum().item() == 1
        ids.zero_()
        assert len(fakes.guesses) == 1

    def test_known_numbers_that_are_replaced_through_a_view(self, fakes):
        ids = ids_of(fakes)
        ids[0].copy_(torch.randn(3))
        assert ids.sum().item() == 1
        assert len(fakes.guesses) == 1


class TestRandomBatches:
    """Numbers that a tool has made up decide nothing silently."""

    @pytest.mark.parametrize(
        "use",
        [
            lambda y: (y > 3).sum().item(),
            lambda y: torch.nonzero(y > 3),
            lambda y: torch.ones(6)[y > 3],
            lambda y: torch.randn(6).masked_select(y > 3),
            lambda y: y.clone().add_(1).max().item(),
            lambda y: y.unique(),
        ],
        ids=["count", "nonzero", "mask", "masked_select", "in_place", "unique"],
    )
    def test_what_they_decide_is_noted(self, use, fakes):
        use(clone_batch(fakes.copy_batch(FLAT)))
        assert fakes.guesses == ()
        use(clone_batch(fakes.copy_batch(MADE_UP)))
        (guess,) = fakes.guesses
        assert guess.startswith("test_known_values.py, line ")
        assert guess.endswith("depends on integers of the batch, which are random here")

    def test_asking_often_is_no_endless_loop(self, fakes, monkeypatch):
        monkeypatch.setattr(known_values, "MAX_ASKED", 2)
        assert fakes.copy_batch(MADE_UP).tolist() == [5, 3, 0, 7, 0, 0]
        assert len(fakes.guesses) == 1


class TestOptimizers:
    def test_what_they_do_next_is_a_guess(self, fakes):
        model = nn.Linear(2, 1)
        model(torch.ones(3, 2)).sum().backward()
        optimizer = torch.optim.LBFGS(model.parameters())
        optimizer.step(lambda: model(torch.ones(3, 2)).sum())
        assert fakes.guesses
        assert all(guess.startswith("torch.optim.lbfgs, line ") for guess in fakes.guesses)

    @pytest.mark.parametrize("foreach", [False, True])
    def test_the_number_of_their_step_is_none(self, foreach, fakes):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        assert optimizer.state[model.weight]["step"].item() == 2
        assert fakes.guesses == ()


def test_a_loop_that_waits_for_other_data_ends(fakes, monkeypatch):
    monkeypatch.setattr(known_values, "MAX_ASKED", 5)

    def wait(x: Tensor) -> None:
        while x.abs().max() > 1e-3:
            x = x / 2

    with pytest.raises(TimeoutError, match=r"test_known_values.py, line \d+: .* 5 times: a loop"):
        wait(torch.randn(3))


def test_no_gradient_overflows_so_that_the_optimizer_steps(fakes):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert set(optimizer.state) == set(model.parameters())
    assert fakes.guesses == ()
