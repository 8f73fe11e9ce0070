"""Operators of torch in words."""

import re

_WORDS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul"), "a matrix product"),
    **dict.fromkeys(("to_copy", "copy"), "a conversion or copy"),
    **dict.fromkeys(("zeros_like", "zeros", "empty_like", "empty", "new_zeros"), "new memory"),
    "cat": "a concatenation",
    "log_softmax": "the logarithm of softmax",
    "embedding_dense": "an embedding",
}


def in_words(op: str) -> str:
    """Say what an operator does, for people who do not know torch's names for it.

    Args:
        op: Such as ``"aten.mm"``.

    Returns:
        Words that may follow "in"; empty for no operator.

    Example:
        >>> in_words("aten.mm"), in_words("aten._foreach_sqrt")
        ('a matrix product', 'the square root of all parameters at once')
        >>> in_words("aten._softmax_backward_data"), in_words("aten.gelu")
        ('the gradient of `softmax`', '`gelu`')
    """
    name = op.rpartition(".")[2].strip("_")
    if not name:
        return ""
    if name.startswith("foreach_"):
        name = name.removeprefix("foreach_")
        words = {"sqrt": "the square root", "norm": "the norm"}.get(name, f"`{name}`")
        return f"{words} of all parameters at once"
    name = name.removesuffix("_forward")
    inner = re.sub(r"_backward(_data)?$", "", name)
    words = _WORDS.get(inner, f"`{inner.removeprefix('native_')}`")
    if "scaled_dot_product" in inner:
        words = "attention"
    return words if inner == name else f"the gradient of {words}"
