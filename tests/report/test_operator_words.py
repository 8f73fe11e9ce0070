"""What people read in place of torch's names of operators."""

import pytest

from lightning_memsave.report.text import in_words


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("", ""),
        ("aten.addmm", "a matrix product"),
        ("aten._to_copy", "a conversion or copy"),
        ("aten.add_", "`add`"),
        ("aten._foreach_addcdiv_", "`addcdiv` of all parameters at once"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward", "the gradient of attention"),
        ("aten.native_dropout", "`dropout`"),
        ("aten.embedding_dense_backward", "the gradient of an embedding"),
        ("aten.nll_loss_forward", "`nll_loss`"),
        ("aten.threshold_backward", "the gradient of `threshold`"),
    ],
)
def test_in_words(op: str, words: str) -> None:
    assert in_words(op) == words
