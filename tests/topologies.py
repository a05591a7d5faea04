"""One tiny network per way in which channels can be coupled, each with an input it accepts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOPOLOGIES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {}


def topology(*shape: int, integers: int = 0) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a function that builds a network for inputs of `shape` (symbols below `integers` if given)."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
            generator = torch.Generator().manual_seed(0)
            network = build()
            with torch.no_grad():
                for tensor in (*network.parameters(), *network.buffers()):
                    if tensor.is_floating_point():
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.4)
                for name, tensor in network.named_buffers():
                    if name.endswith("running_var"):
                        tensor.abs_().add_(0.5)
            if integers:
                return network, (torch.randint(integers, shape, generator=generator),)
            return network, (torch.randn(shape, generator=generator),)

        TOPOLOGIES[build.__name__] = made
        return build

    return register


def conv(into: int, out: int, size: int = 3, **options: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, padding=size // 2, **options)


@topology(2, 5)
def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 8), conv(8, 6), conv(6, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.second(self.first(x).relu_())
        return self.fc(x.mean((2, 3)))


@topology(2, 3, 6, 6)
def residual() -> nn.Module:
    return Residual()


class Concat(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.left, self.right, self.both = conv(3, 8), conv(3, 4), conv(12, 12)
        self.fc = nn.Linear(12 * 9, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), self.right(x)], 1).relu()
        x = x + self.both(x) if self.residual else self.both(x)
        return self.fc(F.max_pool2d(x, 2).flatten(1))


@topology(2, 3, 6, 6)
def concat() -> nn.Module:
    return Concat(residual=False)


@topology(2, 3, 6, 6)
def concat_residual() -> nn.Module:
    return Concat(residual=True)


@topology(2, 3, 6, 6)
def flatten_into_linear() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 6), nn.Linear(6, 3))


@topology(2, 3, 4, 4)
def grouped_wide() -> nn.Module:
    return nn.Sequential(conv(3, 16), conv(16, 24, groups=2), conv(24, 4), nn.Flatten(), nn.Linear(64, 3))


@topology(2, 3, 4, 4)
def grouped_many() -> nn.Module:
    return nn.Sequential(conv(3, 16), conv(16, 16, groups=8), conv(16, 4), nn.Flatten(), nn.Linear(64, 3))


@topology(2, 3, 4, 4)
def depthwise() -> nn.Module:
    return nn.Sequential(
        conv(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(), conv(8, 8, groups=8), nn.BatchNorm2d(8), conv(8, 6, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


@topology(2, 3, 4, 4)
def depthwise_multiplier() -> nn.Module:
    return nn.Sequential(conv(3, 8), conv(8, 16, groups=8), conv(16, 6), nn.Flatten(), nn.Linear(96, 3))


@topology(2, 3, 4, 4)
def batch_norm() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


@topology(2, 3, 4, 4)
def batch_norm_without_statistics() -> nn.Module:
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return nn.Sequential(conv(3, 8), norm, nn.BatchNorm2d(8, affine=False), nn.Flatten(), nn.Linear(128, 3))


@topology(2, 5, 6)
def layer_norm() -> nn.Module:
    bare = nn.LayerNorm(8, elementwise_affine=False)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), bare, nn.RMSNorm(8), nn.Linear(8, 3))


@topology(2, 3, 4, 4)
def group_norm() -> nn.Module:
    bare = nn.GroupNorm(4, 16, affine=False)
    return nn.Sequential(conv(3, 16), nn.GroupNorm(2, 16), conv(16, 16), bare, nn.Flatten(), nn.Linear(256, 3))


@topology(2, 3, 4, 4)
def group_norm_many_groups() -> nn.Module:
    return nn.Sequential(conv(3, 16), nn.GroupNorm(8, 16), nn.GroupNorm(1, 16), nn.Flatten(), nn.Linear(256, 3))


@topology(2, 3, 4, 4)
def instance_norm() -> nn.Module:
    bare = nn.InstanceNorm2d(8, track_running_stats=True)
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8, affine=True), bare, nn.Flatten(), nn.Linear(128, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mix, self.decoder = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.mix(self.encoder(x)).relu())


@topology(2, 5, integers=11)
def tied_embedding() -> nn.Module:
    return Tied()


class Attending(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.into = nn.Linear(5, 16)
        self.memory = nn.Linear(5, options.get("kdim", 16))
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        return self.out(self.attend(self.into(x), memory, memory, need_weights=False)[0])


@topology(2, 6, 5)
def multihead_attention() -> nn.Module:
    return Attending()


@topology(2, 6, 5)
def multihead_attention_separate() -> nn.Module:
    return Attending(kdim=12, vdim=12)


@topology(2, 6, 5)
def transformer_encoder() -> nn.Module:
    block = nn.TransformerEncoderLayer(16, 4, 12, batch_first=True)
    return nn.Sequential(
        nn.Linear(5, 16), nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    )


class FusedAttention(nn.Module):
    """Fused projection, sizes stored as attributes, `view(B, T, 3, H, D)`."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).reshape(batch, time, self.heads * self.head_dim))


class SeparateAttention(nn.Module):
    """Three projections; the head size is computed from the input's shape; torch's own attention."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(y.size(0), y.size(1), self.num_heads, y.size(2) // self.num_heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class ChunkAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1)]
        scores = torch.einsum("bihd,bjhd->bhij", parts[0], parts[1]).softmax(-1)
        return self.proj(torch.einsum("bhij,bjhd->bihd", scores, parts[2]).flatten(2))


class Vit(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.zeros(1, 10, 16))
        self.norm, self.attention = nn.LayerNorm(16), attention()
        self.mlp = nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.Linear(20, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(x)
        return self.head(x[:, 0])


@topology(2, 3, 6, 6)
def vit_fused() -> nn.Module:
    return Vit(FusedAttention)


@topology(2, 3, 6, 6)
def vit_separate() -> nn.Module:
    return Vit(SeparateAttention)


@topology(2, 3, 6, 6)
def vit_chunk() -> nn.Module:
    return Vit(ChunkAttention)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = kind(6, 8, **options)
        width = (options.get("proj_size") or 8) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])


@topology(2, 5, integers=11)
def rnn() -> nn.Module:
    return Recurrent(nn.RNN, batch_first=True)


@topology(2, 5, integers=11)
def gru_two_layers() -> nn.Module:
    return Recurrent(nn.GRU, num_layers=2, batch_first=True)


@topology(2, 5, integers=11)
def lstm_bidirectional() -> nn.Module:
    return Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True)


@topology(2, 5, integers=11)
def lstm_projected() -> nn.Module:
    return Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4)


class CellLoop(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.hidden = 8
        self.embed, self.cell, self.out = nn.Embedding(11, 6), kind(6, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.hidden, device=x.device)
        state, outputs = h, []
        for step in self.embed(x).unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                h, state = self.cell(step, (h, state))
            else:
                h = self.cell(step, h)
            outputs.append(h)
        return self.out(torch.stack(outputs, 1))


@topology(2, 4, integers=11)
def gru_cell() -> nn.Module:
    return CellLoop(nn.GRUCell)


@topology(2, 4, integers=11)
def lstm_cell() -> nn.Module:
    return CellLoop(nn.LSTMCell)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.up, self.fc = conv(3, 8), conv(8, 4, 1), conv(4, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        gate = self.up(self.down(F.adaptive_avg_pool2d(x, 1)).relu())
        return self.fc((x * gate.sigmoid()).mean((2, 3)))


@topology(2, 3, 4, 4)
def squeeze_excite() -> nn.Module:
    return SqueezeExcite()


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.fc = conv(3, 12), conv(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.fc(x.mean((2, 3)))


@topology(2, 3, 4, 4)
def channel_shuffle() -> nn.Module:
    return Shuffle()


@topology(2, 3, 4, 4)
def channel_shuffle_layer() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ChannelShuffle(2), conv(8, 4), nn.PReLU(4), nn.Flatten(), nn.Linear(64, 3))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv(3, 8), conv(8, 12)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.join, self.out = conv(16, 8), conv(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        deep = self.deep(F.max_pool2d(skip, 2)).relu()
        return self.out(self.join(torch.cat([skip, self.up(deep)], 1)))


@topology(2, 3, 4, 4)
def unet() -> nn.Module:
    return UNet()


@topology(2, 5)
def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 32), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 12, 2, stride=2, groups=2),
        nn.ReLU(), nn.Conv2d(12, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 3, 1),
    )  # fmt: skip


class UnequalSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = 4, 8
        self.stem, self.left, self.right = nn.Linear(5, 12), nn.Linear(4, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).split([self.small, self.large], dim=-1)
        return self.left(left) + self.right(right)


@topology(2, 5)
def unequal_split() -> nn.Module:
    return UnequalSplit()


class AttributeSlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = 4
        self.stem, self.left, self.right = nn.Linear(5, 12), nn.Linear(4, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.left(x[:, : self.small]) + self.right(x[:, self.small :])


@topology(2, 5)
def attribute_slice() -> nn.Module:
    return AttributeSlice()


@topology(2, 5)
def weight_norm() -> nn.Module:
    wrap = nn.utils.parametrizations.weight_norm
    return nn.Sequential(wrap(nn.Linear(5, 8)), nn.ReLU(), wrap(nn.Linear(8, 3)))


@topology(2, 5)
def spectral_norm() -> nn.Module:
    wrap = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(5, 8)), nn.ReLU(), wrap(nn.Linear(8, 3)))


@topology(2, 5)
def gated() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.GLU(), nn.Linear(8, 3))


@topology(2, 3, 8)
def one_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.MaxPool1d(2), nn.Dropout(0.5), nn.AdaptiveMaxPool1d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


@topology(2, 3, 4, 4, 4)
def three_dimensional() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(8, 3))


class Positions(nn.Module):
    """A GPT in small: symbols and positions from tables, a stored causal mask, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(11, 16), nn.Embedding(9, 16)
        self.attention, self.norm = FusedAttention(), nn.LayerNorm(16)
        self.register_buffer("mask", torch.tril(torch.ones(9, 9)), persistent=False)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        y = self.symbols(x) + self.places(torch.arange(time, device=x.device))
        weights = self.mask[:time, :time]
        y = y + weights @ self.attention(self.norm(y))
        return self.head(y)


@topology(2, 5, integers=11)
def small_gpt() -> nn.Module:
    return Positions()


class SizesFromTheStream(nn.Module):
    """The head size and the merged size come from the stream's own width, and values get a learned bias per head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.into, self.qkv, self.out = nn.Linear(5, 16), nn.Linear(16, 48), nn.Linear(16, 3)
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.register_buffer("places", torch.arange(16).remainder(9).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        batch, time, width = x.shape
        shape = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.places.view(-1)].view(time, time, -1).permute(2, 0, 1)
        scores = (q @ k.transpose(-2, -1) + bias).softmax(-1)
        return self.out(x + (scores @ v).transpose(1, 2).reshape(batch, time, width))


@topology(2, 4, 5)
def sizes_from_the_stream() -> nn.Module:
    return SizesFromTheStream()


class RotaryShared(nn.Module):
    """Fewer key heads than query heads, rotated by tables of half a head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.pairs, self.size = 4, 2, 8
        self.into, self.out = nn.Linear(5, 16), nn.Linear(32, 3)
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("cos", torch.ones(9, 4))
        self.register_buffer("sin", torch.ones(9, 4))

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        batch, time, _ = x.shape
        q = self.q(x).view(batch, time, self.heads, self.size).transpose(1, 2)
        k, v = (layer(x).view(batch, time, self.pairs, self.size).transpose(1, 2) for layer in (self.k, self.v))
        k, v = (part.repeat_interleave(self.heads // self.pairs, 1) for part in (self.rotate(k), v))
        mixed = F.scaled_dot_product_attention(self.rotate(q), k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, self.heads * self.size))


@topology(2, 6, 5)
def rotary_shared_keys() -> nn.Module:
    return RotaryShared()


class Cosine(nn.Module):
    """Normalised features against normalised prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.prototypes = nn.Linear(5, 8), nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.into(x)), F.normalize(self.prototypes))


@topology(2, 5)
def cosine() -> nn.Module:
    return Cosine()


class Mixer(nn.Module):
    """Mixing over places, then over channels; a depthwise convolution and a scale per channel before."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.near = nn.Conv2d(3, 8, 2, stride=2), conv(8, 8, groups=8)
        self.scale, self.norm = nn.Parameter(torch.zeros(8)), nn.LayerNorm(8)
        self.places, self.back = nn.Linear(4, 6), nn.Linear(6, 4)
        self.channels, self.out = nn.Linear(8, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        x = (x + (self.near(x).permute(0, 2, 3, 1) * self.scale).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = x + self.back(self.places(self.norm(x).transpose(1, 2)).relu()).transpose(1, 2)
        return self.out(self.channels(x).relu().mean(1))


@topology(2, 3, 4, 4)
def mixer() -> nn.Module:
    return Mixer()


class PaddedShortcut(nn.Module):
    """A shortcut that pads channels with zeros: those of the sum that it does not reach stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = conv(3, 8), conv(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.fc((self.second(x) + F.pad(x, (0, 0, 0, 0, 4, 4))).mean((2, 3)))


@topology(2, 3, 4, 4)
def padded_shortcut() -> nn.Module:
    return PaddedShortcut()


class Film(nn.Module):
    """Features scaled and shifted by two halves of another projection; a bilinear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.film, self.pair = conv(3, 8), nn.Linear(3, 16), nn.Bilinear(8, 8, 5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(x.mean((2, 3)))[:, :, None, None].chunk(2, 1)
        pooled = (self.conv(x) * scale + shift).amax((2, 3))
        return self.fc(self.pair(pooled, pooled))


@topology(2, 3, 4, 4)
def film() -> nn.Module:
    return Film()


class Translate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.out = nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(16, 3)
        self.transformer = nn.Transformer(16, 2, 1, 1, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.out(self.transformer(self.source(x), self.target(x), tgt_mask=mask))


@topology(2, 6, 5)
def transformer() -> nn.Module:
    return Translate()


class CausalEncoder(nn.Module):
    """Words that see the words before them; the mask is made on whatever device tensors are made on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 16), nn.Parameter(torch.zeros(1, 6, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.encoder(self.words(x) + self.places, mask=mask))


@topology(2, 6, integers=11)
def causal_encoder() -> nn.Module:
    return CausalEncoder()


class MaskedPositions(nn.Module):
    """Positions and masks made from sizes, whose values the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mid, self.out = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        places = torch.arange(x.shape[1], device=x.device)
        causal = places[:, None] >= places[None]
        if not mask.all() or int(places.max()) != x.shape[1] - 1:
            raise ValueError("padded")
        first = causal.sum(1).tolist().index(1)
        x = self.into(x)[:, causal[-1].nonzero().flatten()]
        return self.out(self.mid(x).relu()[:, first:])


@topology(2, 6, 5)
def masked_positions() -> nn.Module:
    return MaskedPositions()


class Experts(nn.Module):
    """Each row goes to the expert with the largest score; which rows these are depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.router, self.out = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        chosen = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            result.index_add_(0, rows, expert(x[rows]))
        return self.out(result)


@topology(4, 5)
def experts() -> nn.Module:
    return Experts()


class NormOfChannels(nn.LayerNorm):
    """A layer norm over the channels of an image: it moves axes before it normalises."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


@topology(2, 3, 4, 4)
def norm_of_channels() -> nn.Module:
    bare = NormOfChannels(8, elementwise_affine=False)
    return nn.Sequential(conv(3, 8), NormOfChannels(8), conv(8, 8), bare, nn.Flatten(), nn.Linear(128, 3))


class Settings:
    def __init__(self) -> None:
        self.heads, self.size, self.parts = 2, 4, (8, 6)


class FromSettings(nn.Module):
    """Sizes in an object that modules share, and in a tuple of it; one is compared with the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.into, self.mix, self.out = nn.Linear(5, 8), nn.Linear(4, 4), nn.Linear(14, 3)
        self.wide = nn.Linear(8, 14)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if x.shape[-1] != self.settings.parts[0]:
            raise ValueError("other features")
        x = self.mix(x.view(len(x), self.settings.heads, self.settings.size)).reshape(len(x), -1)
        left, right = self.wide(x).split(self.settings.parts, -1)
        return self.out(torch.cat([left.relu(), right], -1))


@topology(2, 5)
def from_settings() -> nn.Module:
    return FromSettings()


class WrittenParts(nn.Module):
    """Results written step by step into a new tensor of the input's type, and a column read for its shape only."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        steps = y[..., -1].shape[1]
        result = y.new_zeros(len(x), steps, y.shape[-1])
        for step in range(steps):
            result[:, step] = y[:, step].relu()
        return self.out(result.unsqueeze_(1).squeeze(1))


@topology(2, 4, 5)
def written_parts() -> nn.Module:
    return WrittenParts()


class Overlapping(nn.Module):
    """Windows that overlap, by strides, and folded together again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.out = conv(3, 8), conv(8, 6), nn.Linear(6 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.stem(x), (1, 1, 1, 1))
        x = F.fold(F.unfold(x, 3, stride=2), (6, 6), 3, stride=2)
        x = self.mid(x)[:, :, :2, :3].contiguous()
        batch, channels, height, width = x.stride()
        return self.out(x.as_strided((*x.shape[:3], 2), (batch, channels, height, width)).flatten(1))


@topology(2, 3, 4, 4)
def overlapping() -> nn.Module:
    return Overlapping()


class Unpooled(nn.Module):
    """Pooling with places, unpooling by them, and a Fourier transform over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.out = conv(3, 8), conv(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, places = F.max_pool2d(self.stem(x), 2, return_indices=True)
        x = F.max_unpool2d(x, places, 2)
        return self.out(torch.fft.fft2(self.mid(x)).real.mean((2, 3)))


@topology(2, 3, 4, 4)
def unpooled() -> nn.Module:
    return Unpooled()


class Waves(nn.Module):
    """Positions as waves, half sines and half cosines of a size that an attribute holds, and one learned kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.paths = 8, 2
        self.into, self.out = nn.Linear(5, 8), nn.Linear(4, 3)
        self.register_buffer("kernel", torch.ones(8, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        rates = torch.arange(0, self.width, 2.0, device=x.device)
        waves = torch.outer(torch.arange(x.shape[1], device=x.device), rates)
        x = x + torch.cat([waves.sin(), waves.cos()], -1)
        x = F.conv1d(x.transpose(1, 2), self.kernel, padding=1, groups=self.width).transpose(1, 2)
        left, right = torch.split(x, self.width // self.paths, -1)
        return self.out(left * right)


@topology(2, 4, 5)
def waves() -> nn.Module:
    return Waves()


class TrainedMask(nn.Module):
    """A learned filler that only training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.filler = nn.Linear(5, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.training and torch.rand([]) < 0.9:
            hidden = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            hidden[:, 0] = True
            x[hidden] = self.filler
        return self.out(x)


@topology(2, 4, 5)
def trained_mask() -> nn.Module:
    return TrainedMask()


class KeywordConvolution(nn.Module):
    """A depthwise convolution called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.kernel = conv(3, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = F.conv2d(input=x, weight=self.kernel, padding=1, groups=x.shape[1])
        return self.out(x.narrow(dim=2, start=0, length=2).mean((2, 3)))


@topology(2, 3, 4, 4)
def keyword_convolution() -> nn.Module:
    return KeywordConvolution()


class OptionalProjection(nn.Module):
    """A block that projects if its stored sizes differ; one of them is no size of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = 4, 8
        self.into, self.project, self.out = nn.Linear(5, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.before != self.after:
            x = self.project(x).view(x.shape[0], -1, self.after)
        return self.out(x)


@topology(2, 4, 5)
def optional_projection() -> nn.Module:
    return OptionalProjection()


class Thirds(nn.Module):
    """Query, key and value of one head cut from one layer at multiples of a stored size; the first two are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 2, 4
        self.qkv, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.size)
        query = parts[..., : self.size].transpose(1, 2)
        key = parts[..., self.size : 2 * self.size].transpose(1, 2)
        value = parts[..., 2 * self.size :].transpose(1, 2)
        half = query.shape[-1] // 2
        key = torch.cat([-key[..., half:], key[..., :half]], -1) + key
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


@topology(2, 4, 5)
def thirds() -> nn.Module:
    return Thirds()


class ChosenPositions(nn.Module):
    """Positions as waves, of which the places of a table are gathered that was expanded to a stored size."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.into, self.mix, self.out = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.arange(0, self.width // 2, device=x.device).float()
        waves = torch.outer(torch.arange(x.shape[1] + 2, device=x.device), rates)
        waves = torch.cat([waves.sin(), waves.cos()], -1)
        places = torch.arange(x.shape[1], device=x.device).flip(0)[:, None].expand(x.shape[1], self.width)
        return self.out(self.mix(self.into(x)) + torch.gather(waves, 0, places))


@topology(2, 4, 5)
def chosen_positions() -> nn.Module:
    return ChosenPositions()


class PlacewiseConvolution(nn.Module):
    """A convolution over a stack of rows whose window has one place, so that the units of the rows pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 8), nn.Linear(5, 8)
        self.mix, self.out = nn.Conv1d(2, 4, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(torch.stack([self.left(x), self.right(x)], 1)).relu().mean(1))


@topology(2, 5)
def placewise_convolution() -> nn.Module:
    return PlacewiseConvolution()


class RotatedAfterFirst(nn.Module):
    """Attention whose first token is joined unrotated to the others, of which pairs of channels are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qk, self.value, self.out = nn.Linear(5, 16), nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("angle", torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            return torch.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)

        query, key = map(split, self.qk(x).chunk(2, -1))
        rest = query[:, :, 1:]
        query = torch.cat([query[:, :, :1], rest * self.angle.cos() + turned(rest) * self.angle.sin()], 2)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ split(self.value(x))
        return self.out(mixed.transpose(1, 2).flatten(2))


@topology(2, 4, 5)
def rotated_after_first() -> nn.Module:
    return RotatedAfterFirst()


class Blurred(nn.Module):
    """A depthwise convolution with a kernel that the forward repeats for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mid, self.out = conv(3, 8), conv(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        kernel = torch.tensor([1.0, 2.0, 1.0], device=x.device).repeat((x.shape[1], 1, 3, 1))
        return self.out(self.mid(F.conv2d(x, kernel, padding=1, groups=x.shape[1])).mean((2, 3)))


@topology(2, 3, 4, 4)
def blurred() -> nn.Module:
    return Blurred()


class ShuffledGroups(nn.Module):
    """Channels shuffled between two convolutions with groups, which leaves as many units in a group as groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 3
        self.stem = conv(3, 12)
        self.first, self.second = conv(12, 27, 1, groups=3), conv(27, 12, 1, groups=3)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.first(x).relu()
        y = y.view(len(y), self.groups, y.shape[1] // self.groups, *y.shape[2:]).transpose(1, 2).reshape(y.shape)
        return self.out((x + self.second(y)).mean((2, 3)))


@topology(2, 3, 4, 4)
def shuffled_groups() -> nn.Module:
    return ShuffledGroups()


class SilencedThird(nn.Module):
    """One layer makes three parts; the middle third of its bias, found by its count of elements, is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.parts.bias.clone()
        third = bias.numel() // 3
        bias[third : 2 * third].zero_()
        first, second, last = F.linear(x, self.parts.weight, bias).chunk(3, -1)
        return self.out(first.tanh() * second + last)


@topology(2, 5)
def silenced_third() -> nn.Module:
    return SilencedThird()
