"""The four models of Echo's evaluation (ISCA 2020, Table III), widths and batches scaled to a machine of two cores.

Each builder gives (model, batch, blocks): `model(**batch).loss` is the training loss, `blocks(model)` the modules that
per-block checkpointing would wrap. Recurrent layers are loops over cells, as in the source's framework; the `_fused`
variants call `nn.LSTM` and `nn.GRU`, each of which is one opaque op on the CPU where oneDNN has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.convolutional import Built


class Output(NamedTuple):
    """What a model returns, named as `transformers` names it."""

    loss: Tensor


class Loop(nn.Module):
    """A recurrent layer as a loop over its cell: [time, batch, features] to [time, batch, width]."""

    def __init__(self, cell: nn.LSTMCell | nn.GRUCell, backwards: bool = False) -> None:
        super().__init__()
        self.cell = cell
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for now in reversed(x.unbind()) if self.backwards else x.unbind():
            state = self.cell(now, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found[::-1] if self.backwards else found)


class BothWays(nn.Module):
    """Two loops over a sequence, one from each end; what they say of a moment is concatenated."""

    def __init__(self, cell: type[nn.LSTMCell] | type[nn.GRUCell], features: int, width: int) -> None:
        super().__init__()
        self.ahead = Loop(cell(features, width))
        self.back = Loop(cell(features, width), backwards=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.ahead(x), self.back(x)], -1)


class Fused(nn.Module):
    """The same as `Loop` or `BothWays`, by torch's own layer."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    """Bahdanau's: score(q, k) = v . tanh(q W + k). Of every target word it leaves one feature map [batch, source, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.combine = nn.Linear(2 * width, width)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = self.score(torch.tanh(keys + self.query(query).unsqueeze(1))).squeeze(-1)
        context = torch.bmm(scores.softmax(-1).unsqueeze(1), values).squeeze(1)
        return torch.tanh(self.combine(torch.cat([query, context], -1)))


class Translator(nn.Module):
    """Encoder of two LSTM layers, the first in both directions; decoder of two that reads its last attention (input feeding).

    `fused`: the decoder's layers are `nn.LSTM` as well, and so read no attention.
    """

    def __init__(self, words: int, width: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        both = Fused(nn.LSTM(width, width // 2, bidirectional=True)) if fused else BothWays(nn.LSTMCell, width, width // 2)
        upper = Fused(nn.LSTM(width, width)) if fused else Loop(nn.LSTMCell(width, width))
        self.encoder = nn.ModuleList([both, upper])
        if fused:
            self.decoder = nn.ModuleList([Fused(nn.LSTM(width, width)) for _ in range(2)])
        else:
            self.decoder = nn.ModuleList([nn.LSTMCell(2 * width, width), nn.LSTMCell(width, width)])
        self.key = nn.Linear(width, width)
        self.attention = Attention(width)
        self.output = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Output:
        """`source` [batch, time], `target` [batch, time + 1]: its first word begins the sentence."""
        h = self.source(source.t())
        for layer in self.encoder:
            h = layer(self.dropout(h))
        values = h.transpose(0, 1).contiguous()
        keys = self.key(values)
        read = self.dropout(self.target(target[:, :-1].t()))
        attended = self._decode_whole(read, keys, values) if self.fused else self._decode(read, keys, values)
        logits = self.output(self.dropout(attended))
        return Output(F.cross_entropy(logits.flatten(0, 1), target[:, 1:].t().flatten()))

    def _decode(self, read: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lower, upper = self.decoder
        below, above, attended = None, None, [torch.zeros_like(values[:, 0])]
        for word in read.unbind():
            below = lower(torch.cat([word, attended[-1]], -1), below)
            above = upper(self.dropout(below[0]), above)
            attended.append(self.attention(above[0], keys, values))
        return torch.stack(attended[1:])

    def _decode_whole(self, read: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lower, upper = self.decoder
        h = upper(self.dropout(lower(read)))
        return torch.stack([self.attention(query, keys, values) for query in h.unbind()])


def nmt(time: int = 48, batch: int = 32, width: int = 128, fused: bool = False) -> Built:
    """NMT: LSTM translation with attention, as in Sockeye; `time` words on both sides, 1,000 words."""
    words = {"source": torch.randint(0, 1000, (batch, time)), "target": torch.randint(0, 1000, (batch, time + 1))}
    model = Translator(1000, width, 0.2, fused).train()
    return model, words, lambda m: [*m.encoder, m.attention]


class Speech(nn.Module):
    """DeepSpeech2: two convolutions with batch norm and clipped ReLU, layers of GRUs in both directions, CTC."""

    def __init__(self, bands: int, channels: int, width: int, layers: int, letters: int, fused: bool) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), (2, 2), (20, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(channels, channels, (21, 11), (2, 1), (10, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20, inplace=True),
        )
        features = [channels * bands // 4, *[2 * width] * (layers - 1)]
        self.recurrent = nn.ModuleList(
            Fused(nn.GRU(n, width, bidirectional=True)) if fused else BothWays(nn.GRUCell, n, width) for n in features
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(n) for n in features)
        self.output = nn.Linear(2 * width, letters)

    def forward(self, sound: Tensor, text: Tensor) -> Output:
        """`sound` [batch, 1, bands, frames], `text` [batch, letters]."""
        x = self.convolutions(sound).flatten(1, 2).permute(2, 0, 1)
        for norm, layer in zip(self.norms, self.recurrent, strict=True):
            x = layer(norm(x.flatten(0, 1)).view_as(x))
        time, batch = x.shape[:2]
        chances = self.output(x).log_softmax(-1)
        return Output(F.ctc_loss(chances, text, (time,) * batch, (text.shape[1],) * batch))


def deepspeech2(frames: int = 96, batch: int = 24, width: int = 128, layers: int = 3, fused: bool = False) -> Built:
    """DeepSpeech2: spectrograms of 64 bands; half as many moments as `frames` reach the recurrent layers."""
    data = {"sound": torch.randn(batch, 1, 64, frames), "text": torch.randint(1, 29, (batch, 12))}
    model = Speech(64, 16, width, layers, 29, fused).train()
    return model, data, lambda m: [m.convolutions, *m.recurrent]


class Seq2Seq(nn.Module):
    """`torch.nn.Transformer` with learned positions, dropout in its attention too."""

    def __init__(self, words: int, width: int, layers: int, time: int, heads: int | None = None) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(time, width))
        self.dropout = nn.Dropout(0.1)
        self.body = nn.Transformer(width, heads or max(2, width // 48), layers, layers, 4 * width, batch_first=True)
        self.output = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(time), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Output:
        read = self.dropout(self.source(source) + self.positions)
        said = self.dropout(self.target(target[:, :-1]) + self.positions)
        h = self.body(read, said, tgt_mask=self.mask, tgt_is_causal=True)
        return Output(F.cross_entropy(self.output(h).flatten(0, 1), target[:, 1:].flatten()))


def transformer(layers: int = 6, batch: int = 16, time: int = 64, width: int = 192) -> Built:
    """Transformer: encoder and decoder of `layers` layers each."""
    words = {"source": torch.randint(0, 1000, (batch, time)), "target": torch.randint(0, 1000, (batch, time + 1))}
    model = Seq2Seq(1000, width, layers, time).train()
    return model, words, lambda m: [*m.body.encoder.layers, *m.body.decoder.layers]


def resnet(depths: tuple[int, int, int, int] = (3, 8, 36, 3), batch: int = 32, width: int = 64) -> Built:
    """ResNet-152, 1/4 width: bottleneck, 3-8-36-3: 64 x 64 pixels."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    config = transformers.ResNetConfig(
        embedding_size=width // 4, hidden_sizes=widths, depths=list(depths), layer_type="bottleneck", num_labels=10
    )
    images = {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}
    model = transformers.ResNetForImageClassification(config).train()
    return model, images, lambda m: [layer for stage in m.resnet.encoder.stages for layer in stage.layers]


def nmt_fused() -> Built:
    return nmt(fused=True)


def deepspeech2_fused() -> Built:
    return deepspeech2(fused=True)


MODELS = {"nmt": nmt, "deepspeech2": deepspeech2, "transformer": transformer, "resnet152": resnet}
FUSED = {"nmt_fused": nmt_fused, "deepspeech2_fused": deepspeech2_fused}
