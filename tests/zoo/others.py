"""x-transformers, and MONAI's networks for medical volumes."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.entries import Entry, Inputs, images, numbers, tokens

LAYERS = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}


def reading(name: str, kind: str = "Decoder", **options: Any) -> Entry:
    """A language model of x-transformers with these options of its attention layers."""

    def build() -> nn.Module:
        import x_transformers

        layers = getattr(x_transformers, kind)(**LAYERS, **options)
        return x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)

    return Entry(f"x-transformers/{name}", build, tokens(), ("x_transformers",))


def watching() -> nn.Module:
    import x_transformers

    layers = x_transformers.Encoder(**LAYERS)
    return x_transformers.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)


def continuing() -> nn.Module:
    import x_transformers

    layers = x_transformers.Decoder(**LAYERS)
    return x_transformers.ContinuousTransformerWrapper(dim_in=6, dim_out=5, max_seq_len=16, attn_layers=layers)


def medical(name: str, inputs: Inputs, **options: Any) -> Entry:
    """A network of MONAI."""

    def build() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**options)

    return Entry(f"monai/{name}", build, inputs, ("monai",))


def volumes(size: int) -> Inputs:
    return numbers(2, 1, size, size, size)


PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}

# fmt: off
ENTRIES: list[Entry] = [
    reading("decoder"), reading("encoder", "Encoder"), reading("rotary", rotary_pos_emb=True),
    reading("alibi", alibi_pos_bias=True), reading("relative-bias", rel_pos_bias=True),
    reading("rmsnorm", use_rmsnorm=True), reading("gated-swish", ff_swish=True, ff_glu=True),
    reading("grouped-keys", attn_kv_heads=2), reading("one-key-head", attn_one_kv_head=True),
    reading("normed-keys", attn_qk_norm=True), reading("memory-keys", attn_num_mem_kv=4),
    reading("squared-relu", ff_relu_squared=True), reading("simple-rmsnorm", use_simple_rmsnorm=True),
    reading("sandwich", sandwich_norm=True), reading("shifted", shift_tokens=1),
    reading("talking-heads", attn_pre_talking_heads=True, attn_post_talking_heads=True),
    Entry("x-transformers/vit", watching, images(), ("x_transformers",)),
    Entry("x-transformers/continuous", continuing, numbers(2, 12, 6), ("x_transformers",)),
    medical("UNet", images(32, 1), **PLANE, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
    medical("BasicUNet", images(32, 1), **PLANE, features=(8, 8, 16, 16, 32, 8)),
    medical("AttentionUnet", images(32, 1), **PLANE, channels=(8, 16, 32), strides=(2, 2)),
    medical("DynUNet", images(32, 1), **PLANE, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
            filters=[8, 16, 32]),
    medical("SegResNet", images(32, 1), spatial_dims=2, in_channels=1, out_channels=3, init_filters=8),
    medical("SegResNetDS", images(32, 1), spatial_dims=2, in_channels=1, out_channels=3, init_filters=8,
            blocks_down=(1, 1, 1)),
    medical("VNet", volumes(32), spatial_dims=3, in_channels=1, out_channels=3),
    medical("HighResNet", volumes(16), spatial_dims=3, in_channels=1, out_channels=3),
    medical("UNETR", images(32, 1), in_channels=1, out_channels=3, img_size=32, feature_size=8, hidden_size=32,
            mlp_dim=48, num_heads=4, spatial_dims=2),
    medical("SwinUNETR", images(64, 1), in_channels=1, out_channels=3, feature_size=12, spatial_dims=2,
            depths=(1, 1, 1, 1)),
    medical("ViT", images(32, 1), in_channels=1, img_size=32, patch_size=8, hidden_size=32, mlp_dim=48, num_layers=2,
            num_heads=4, classification=True, num_classes=5, spatial_dims=2),
    medical("DenseNet121", images(64, 1), **PLANE), medical("SEResNet50", images(64, 1), spatial_dims=2, in_channels=1,
                                                            num_classes=3),
    medical("EfficientNetBN", images(64), model_name="efficientnet-b0", pretrained=False, spatial_dims=2,
            num_classes=3),
    medical("FlexibleUNet", images(64), in_channels=3, out_channels=3, backbone="resnet18", spatial_dims=2),
    medical("Regressor", images(32, 1), in_shape=(1, 32, 32), out_shape=(3,), channels=(8, 16), strides=(2, 2)),
    medical("AutoEncoder", images(32, 1), **PLANE, channels=(8, 16), strides=(2, 2)),
    medical("MILModel", numbers(2, 3, 3, 64, 64), num_classes=3, pretrained=False),
    medical("MedNeXt", images(64, 1), spatial_dims=2, init_filters=8, in_channels=1, out_channels=3,
            blocks_down=(1, 1, 1, 1), blocks_up=(1, 1, 1, 1)),
    medical("FullyConnectedNet", numbers(2, 12), in_channels=12, out_channels=3, hidden_channels=(16, 16)),
    medical("ResNet", volumes(16), block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 16, 32, 64],
            n_input_channels=1, num_classes=3),
    medical("AHNet", images(128, 1), spatial_dims=2, in_channels=1, out_channels=3),
]
# fmt: on
