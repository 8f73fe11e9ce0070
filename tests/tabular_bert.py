"""A transformer over rows of a table, as IBM's TabFormer has it: one embedding table, two models.

The vocabulary is that of all columns together. A small transformer reads the columns of each row, a
BERT then reads the rows, and the second table, which BERT brings along, serves as the output layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_COLUMNS = 13
FIELD_SIZE = 64
SPECIAL = 7  # [UNK], [SEP], [PAD], [CLS], [MASK], [BOS], [EOS]

SMALL_VOCABULARY = 2_912
LARGE_VOCABULARY = 867_813
SMALL_PARAMETERS = 98_510_560
LARGE_PARAMETERS = 874_326_757
# One column has nearly all categories. The others are made up, so that the sum is right.
LARGE_CARDINALITIES = {"account": 867_599} | {
    f"column_{i}": (214 - SPECIAL) // 12 + (i < (214 - SPECIAL) % 12) for i in range(12)
}


@dataclass
class Vocabulary:
    """What belongs to which column: the model asks it during its forward pass."""

    cardinalities: dict[str, int]

    def ids_of(self, column: str) -> range:
        start = SPECIAL
        for name, size in self.cardinalities.items():
            if name == column:
                return range(start, start + size)
            start += size
        raise KeyError(column)


@dataclass
class Rows:
    """A batch: not a tensor, and with strings in it. Ids and labels are (rows, time, columns)."""

    columns: tuple[str, ...]
    ids: Tensor
    labels: Tensor


class ColumnEmbeddings(nn.Module):
    def __init__(self, vocabulary_size: int, num_columns: int, size: int, hidden_size: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary_size, size, padding_idx=0)
        layer = nn.TransformerEncoderLayer(size, 8, size, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.lin_proj = nn.Linear(size * num_columns, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        fields = self.word_embeddings(ids.flatten(0, 1))
        fields = self.transformer_encoder(fields)
        return self.lin_proj(fields.flatten(1)).unflatten(0, ids.shape[:2])


class MaskedHead(nn.Module):
    def __init__(self, size: int, hidden_size: int, embeddings: nn.Embedding):
        super().__init__()
        self.dense = nn.Linear(size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size)
        self.decoder = nn.Linear(hidden_size, embeddings.num_embeddings)
        self.decoder.weight = embeddings.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(nn.functional.gelu(self.dense(hidden))))


class TabularBert(nn.Module):
    """The whole; it returns its loss."""

    def __init__(
        self,
        vocabulary_size: int,
        num_columns: int = NUM_COLUMNS,
        num_layers: int = 12,
        size: int = FIELD_SIZE,
        vocabulary: Vocabulary | None = None,
    ):
        super().__init__()
        from transformers import BertConfig, BertModel

        self.vocabulary = vocabulary
        hidden_size = num_columns * size
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=hidden_size,
            num_attention_heads=num_columns,
            num_hidden_layers=num_layers,
        )
        self.tab_embeddings = ColumnEmbeddings(vocabulary_size, num_columns, size, hidden_size)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = MaskedHead(size, hidden_size, self.bert.embeddings.word_embeddings)

    def forward(self, rows: Rows) -> Tensor:
        hidden = self.bert(inputs_embeds=self.tab_embeddings(rows.ids)).last_hidden_state
        scores = self.cls(hidden.unflatten(-1, (len(rows.columns), -1)))
        losses = []
        for i, column in enumerate(rows.columns):
            ids = self.vocabulary.ids_of(column)
            of_column = scores[:, :, i, ids.start : ids.stop].flatten(0, 1)
            losses.append(
                nn.functional.cross_entropy(of_column, rows.labels[:, :, i].flatten() - ids.start)
            )
        return torch.stack(losses).sum()


def meta_tabular_bert(vocabulary_size: int) -> TabularBert:
    with torch.device("meta"):
        return TabularBert(vocabulary_size)
