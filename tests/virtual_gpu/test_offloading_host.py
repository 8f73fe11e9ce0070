"""The host's side of offloading on CUDA: scales of losses, devices, worker processes, waits."""

from typing import Any

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

SCALED = """
    import json, torch
    from torch import nn
    from lightning_memsave import Offloading

    def train(technique, fused, clips, overflows):
        torch.manual_seed(0)
        blocks = [nn.Linear(32, 32) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
        undo = []
        if technique is not None:
            undo.append(technique.apply(model).undo)
            undo.append(technique.update_in_background(optimizer).undo)
        found = []
        for number in range(6):
            with torch.autocast("cuda", torch.float16):
                ids = torch.arange(number, number + 8).cuda()
                loss = model(ids).float().square().mean()
            if number in overflows:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append([loss.item(), scaler.get_scale()])
        for function in reversed(undo):
            function()
        return found

    plain_method = torch.amp.GradScaler._unscale_grads_
    results = []
    for fused, clips in [(None, False), (None, True), (True, False)]:
        for overflows in [(), (2,), (0, 3)]:
            how = fused, clips, overflows
            technique = Offloading(%r, resident=%r, blocks="Linear", min_table_bytes=1)
            # The host's updates are torch's fused kernels, which round in their own way.
            results.append([train(None, True, clips, overflows), train(technique, *how)])
    assert torch.amp.GradScaler._unscale_grads_ is plain_method
    print(json.dumps(results))
"""


@pytest.mark.parametrize("late", ["0", "1"])
@pytest.mark.parametrize(
    ("what", "resident"),
    [("optimizer", 0), ("parameters", 0), ("parameters", 2), ("embeddings", 0)],
)
def test_scaled_losses_give_the_same_training(what, resident, late):
    """With late copies, gradients on the host met a scale that had not landed, or an old zero."""
    code = SCALED % (what, resident)
    results = run_python(code, card="t4", VGPU_COMPUTE="1", VGPU_LATE=late)
    for index, (plain, offloaded) in enumerate(results):
        assert [scale for _, scale in offloaded] == [scale for _, scale in plain]
        # What is not on the host is updated on the device, in the last three fused, too.
        is_on_device = what == "embeddings" or resident > 0
        tolerance = 1e-3 if is_on_device and index < 6 else 1e-6
        losses = [loss for loss, _ in plain]
        assert [loss for loss, _ in offloaded] == pytest.approx(losses, rel=tolerance)


COPIED = """
    import copy, json, torch
    from torch import nn
    from lightning_memsave import Offloading

    def train(technique, copies):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3)]
        model = nn.Sequential(*layers, nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = technique.apply(model)
        updates, losses = technique.update_in_background(optimizer), []
        for number in range(4):
            loss = model(torch.full((8, 32), float(number), device="cuda")).square().mean()
            copied = copy.deepcopy(model) if copies else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        updates.undo()
        handle.undo()
        return losses

    technique = Offloading(%r, blocks="Sequential")
    print(json.dumps([train(technique, copies) for copies in (False, True)]))
"""


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_a_copy_in_the_middle_of_a_pass_leaves_its_weights_on_the_device(what):
    without, copied = run_python(COPIED % what, card="t4", VGPU_COMPUTE="1")
    assert copied == without


def test_a_trainer_in_half_precision_gives_the_same_training():
    code = """
    import json, torch
    from torch import nn
    from lightning.pytorch import LightningModule, Trainer
    from lightning_memsave import MemSaveCallback

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(batch).square().mean() * (1e9 if index == 2 else 1.0)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(*callbacks):
        lit = Lit()
        trainer = Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=1,
            gradient_clip_val=0.1, callbacks=[*callbacks], logger=False, barebones=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)]
        trainer.fit(lit, torch.utils.data.DataLoader(batches, batch_size=None))
        return [*lit.losses, trainer.precision_plugin.scaler.get_scale()]

    callback = MemSaveCallback(preset="off", offload="parameters", blocks=nn.Linear,
                               predict=False, report=False)
    print(json.dumps([fit(), fit(callback)]))
    """
    plain, offloaded = run_python(code, card="t4", VGPU_COMPUTE="1", VGPU_LATE="1")
    assert plain[-1] < 2**16, "a step was left out"
    assert offloaded == pytest.approx(plain, rel=1e-6)


TRAINER = """
    import ctypes, json, sys, threading, warnings, torch
    from pathlib import Path
    from torch import nn
    from lightning.pytorch import LightningModule, Trainer
    from transformers import GPT2Config, GPT2LMHeadModel
    from lightning_memsave import MemSaveCallback
    from tests.virtual_gpu import counters

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=16,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 32
        def __getitem__(self, index):
            ids = (torch.arange(16) * (index + 1)) % 64
            mapped, missing = 0, 0
            for line in Path("/proc/self/smaps").read_text().splitlines():
                mapped += line.startswith("VmFlags") and " dc" in line
            return {"input_ids": ids, "labels": ids, "mapped": torch.tensor(mapped)}

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = GPT2LMHeadModel(config)
            self.losses, self.in_workers, self.here = [], [], []

        def training_step(self, batch):
            self.in_workers += batch.pop("mapped").tolist()
            flags = Path("/proc/self/smaps").read_text().splitlines()
            self.here.append(sum(f.startswith("VmFlags") and " dc" in f for f in flags))
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
"""


def test_worker_processes_do_not_have_locked_memory():
    code = (
        TRAINER
        + """
    callback = MemSaveCallback(preset="offload", predict=False, report=False)
    lit = Lit()
    Trainer(accelerator="gpu", devices=1, max_epochs=2, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(
        lit, torch.utils.data.DataLoader(Words(), batch_size=8, num_workers=4))
    left = [t.name for t in threading.enumerate() if t.name.startswith("memsave-host")]
    print(json.dumps([lit.losses, max(lit.in_workers), min(lit.here), left]))
    """
    )
    losses, in_workers, here, left = run_python(code, card="rtx3060", VGPU_COMPUTE="1")
    assert losses[-1] < losses[0]
    assert in_workers == 0
    assert here > 0, "locked memory is in the process of the training itself"
    assert left == []


def test_the_first_gpu_is_left_alone_by_training_on_the_second():
    code = (
        TRAINER
        + """
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 32)
            self.blocks = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        def forward(self, input_ids, labels):
            loss = self.blocks(self.table(input_ids)).float().square().mean()
            return type("Output", (), {"loss": loss})

    seen = []
    def note(name, function):
        def run(*args):
            seen.append([name, torch.cuda.current_device()])
            return function(*args)
        return run
    runtime = torch.cuda.cudart()
    class Runtime:
        cudaHostRegister = staticmethod(note("register", runtime.cudaHostRegister))
        cudaHostUnregister = staticmethod(note("unregister", runtime.cudaHostUnregister))
    torch.cuda.cudart = lambda: Runtime
    torch.cuda.Event.synchronize = note("wait", torch.cuda.Event.synchronize)
    callback = MemSaveCallback(preset="off", offload=True, optimizer_in_backward=True,
        low_precision_weights="master", predict=False, report=False)
    lit = Lit()
    lit.model = Blocks()
    Trainer(accelerator="gpu", devices=[1], precision="bf16-mixed", max_epochs=1, logger=False,
        callbacks=[callback], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False).fit(
        lit, torch.utils.data.DataLoader(Words(), batch_size=8))
    torch.cuda.set_device(0)
    del callback, lit
    import gc; gc.collect()
    print(json.dumps([sorted(set(map(tuple, seen))), torch.cuda.memory_reserved(0)]))
    """
    )
    seen, reserved = run_python(code, card="rtx3060", VGPU_COMPUTE="1", VGPU_DEVICES="2")
    assert seen == [["register", 1], ["unregister", 1], ["wait", 1]]
    assert reserved == 0


def test_counts_of_another_gpu_than_the_current_one_have_landed():
    """Of rows with labels, which chunked cross-entropy reads in its next call."""
    code = """
    import json, torch
    from lightning_memsave.techniques.chunked_cross_entropy.kernel import _Counted
    torch.cuda.set_stream(torch.cuda.Stream("cuda:1"))
    torch.cuda.set_device(0)
    latest, counted = _Counted(), torch.ones(8, dtype=torch.bool, device="cuda:1")
    latest.note(8, 8)
    latest.note(counted, 8)
    print(json.dumps([torch.cuda.current_device(), latest.takes_all(8)]))
    """
    found = run_python(code, VGPU_COMPUTE="1", VGPU_LATE="1", VGPU_DEVICES="2")
    assert found == [0, True]


def test_a_step_with_tables_copies_through_page_locked_memory_only():
    """A copy from or to other memory stops the thread that launches, whatever it is called."""
    code = """
    import json, torch
    from torch import nn
    from lightning_memsave import Offloading
    from tests.virtual_gpu import counters

    torch.manual_seed(0)
    layers = [nn.Embedding(64, 32), *[nn.Linear(32, 32) for _ in range(3)], nn.Linear(32, 4)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    technique = Offloading("parameters+embeddings", blocks="Linear", min_table_bytes=1)
    handle = technique.apply(model)
    updates = technique.update_in_background(optimizer)
    for number in range(3):
        ids = torch.arange(number, number + 8, dtype=torch.int32).cuda()
        torch.cuda.synchronize()
        counters.reset()
        model(ids).square().mean().backward()
        optimizer.step()
        report = counters.report()
        optimizer.zero_grad()
    waits = {k: n for k, n in report["calls"].items() if k.startswith("wait: ")}
    print(json.dumps([waits, sorted(report["copies"])]))
    updates.undo()
    handle.undo()
    """
    waits, copies = run_python(code, VGPU_COMPUTE="1")
    assert waits == {"wait: cudaEventSynchronize": 2}  # for the ids, and for all gradients
    assert set(copies) <= {"d2d async", "d2h pinned async", "h2d pinned async"}


HEAD = """
    import json, torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from lightning_memsave import MemSaveCallback, Offloading, predict_memory
    from lightning_memsave.prediction.cuda.gpus import local_gpu
    from tests.callbacks.lit import fit, loader_of, make_lit, rows_of

    config = LlamaConfig(vocab_size=20000, hidden_size=128, intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    batches = [(torch.arange(256).view(4, 64) * (i + 1)) % 20000 for i in range(5)]

    def settings(what):
        offload = Offloading("parameters" + what, min_table_bytes=2**20)
        return {"preset": "offload", "offload": offload, "micro_batch_size": None}

    def losses_of(what):
        torch.manual_seed(0)
        lit = make_lit(
            model=LlamaForCausalLM(config),
            training_step=lambda self, ids, _: self.model(input_ids=ids, labels=ids).loss,
            train_dataloader=lambda self: loader_of(batches),
        )
        callback = MemSaveCallback(**settings(what), predict=False, report=False)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = fit(lit, callback, accelerator="gpu", limit_val_batches=0, gradient_clip_val=1.0)
        is_on_host = "embeddings on the host" in str(rows_of(callback)["offload"].details)
        return found[0], torch.cuda.max_memory_allocated(), is_on_host

    found = [losses_of(what) for what in ("", "+embeddings")]
    inputs = {"input_ids": batches[0], "labels": batches[0]}
    predicted = predict_memory(LlamaForCausalLM(config), inputs, settings=settings("+embeddings"),
        gpu=local_gpu(torch.device("cuda", 0)))
    print(json.dumps([*found, predicted.allocated_bytes]))
"""


@pytest.fixture(scope="module")
def head() -> list[Any]:
    found: list[Any] = run_python(HEAD, card="a100", VGPU_COMPUTE="1", VGPU_STRICT="1")
    return found


def test_a_head_on_the_host_trains_as_one_on_the_device(head):
    (plain, num_bytes, _), (ours, fewer_bytes, is_on_host), predicted = head
    assert is_on_host
    assert ours == pytest.approx(plain, rel=2e-3)  # sums of other tiles
    assert fewer_bytes < num_bytes - 20000 * 128 * 2
    assert fewer_bytes == predicted


@pytest.mark.parametrize("how", ["VGPU_LATE", "TORCH_CUDA_SANITIZER"])
def test_a_head_on_the_host_waits_for_its_tiles(head, how):
    """Late copies give the same bits, and torch's check for races finds nothing."""
    variables: Any = {how: "1", "VGPU_COMPUTE": "1", "VGPU_STRICT": "1"}
    assert run_python(HEAD, card="a100", **variables)[1][0] == head[1][0]
