"""`attention` of `MemSaveCallback`."""

from lightning_memsave.callbacks.settings.setting import ModuleSetting
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel


class AttentionSetting(ModuleSetting):
    kind = AttentionKernel
    runs_in_stages = True
