"""Projects as users have them, and the command run in them."""

import json
import textwrap
from pathlib import Path
from typing import Any

import lightning_memsave
from lightning_memsave.cli.main import main

ROOT = Path(lightning_memsave.__file__).parents[1]

CODE = """
    import torch
    from torch import nn
    import lightning.pytorch as pl

    class Net(nn.Module):
        def __init__(self, width: int = 64, depth: int = 2):
            super().__init__()
            layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x)

    class Lit(pl.LightningModule):
        def __init__(self, width: int = 64, depth: int = 2):
            super().__init__()
            print("the user's own words")
            self.net = Net(width, depth)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    class Unlogged(Lit):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

    def large():
        return Lit(256)

    def needs_gpu():
        return Net().to("cuda")

    def fails():
        raise KeyError("width")

    class Leaves(Lit):
        def training_step(self, batch, batch_idx):
            raise SystemExit(5)

    class Endless(Lit):
        def training_step(self, batch, batch_idx):
            hidden = self.net(batch[0])
            while hidden.abs().max().item() > 1e-3:
                hidden = hidden / 2
            return hidden.sum()

    class Choosing(Lit):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.net(x[y > 3]).sum()

    class Manual(Lit):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    def make_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
BATCH = "float32[8,64],int64[8]<64"
TINY_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_project(folder: Path) -> None:
    """Write ``net.py`` with models, ``gpt2/config.json`` and ``config.yaml``."""
    (folder / "net.py").write_text(textwrap.dedent(CODE))
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text(json.dumps(TINY_GPT2))
    (folder / "config.yaml").write_text(
        "model:\n  class_path: net.Lit\n  init_args:\n    width: 64\n"
        "trainer:\n  accelerator: gpu\n  devices: 4\n  precision: 16-mixed\n  max_epochs: 3\n"
        "  callbacks:\n    - class_path: lightning_memsave.MemSaveCallback\n"
        "      init_args:\n        optimizer: null\n        activation_checkpointing: all\n"
    )


def json_of(capsys: Any, *args: str, status: int = 0) -> dict[str, Any]:
    """Run the command with ``--json`` and give what it printed."""
    capsys.readouterr()
    assert main([*args, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def message_of(capsys: Any, *args: str, status: int = 2) -> str:
    """Run a command that fails and give its one line."""
    capsys.readouterr()
    assert main([*args]) == status
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("memsave ")]
    assert out == ""
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]
