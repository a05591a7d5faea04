"""Networks for images: timm, pytorchcv, torchvision, segmentation-models-pytorch."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.entries import Entry, images


def timm_entry(name: str, size: int = 64, **options: Any) -> Entry:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **options)

    return Entry(f"timm/{name}", build, images(size), ("timm",))


def cv_entry(name: str, size: int = 64, **options: Any) -> Entry:
    def build() -> nn.Module:
        from pytorchcv.model_provider import get_model

        return get_model(name, pretrained=False, **options)

    return Entry(f"pytorchcv/{name}", build, images(size), ("pytorchcv",))


def vision_entry(name: str, size: int = 64, **options: Any) -> Entry:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, num_classes=5, **options)

    return Entry(f"torchvision/{name}", build, images(size), ("torchvision",))


def segmenting(name: str, encoder: str = "resnet18", size: int = 64, **options: Any) -> Entry:
    def build() -> nn.Module:
        import segmentation_models_pytorch

        made = getattr(segmentation_models_pytorch, name)
        return made(encoder_name=encoder, encoder_weights=None, classes=3, **options)

    return Entry(f"segmentation/{name}-{encoder}", build, images(size), ("segmentation_models_pytorch", "timm"))


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
FOUR = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}

# fmt: off
TIMM = [
    *(timm_entry(name) for name in (
        "resnet18", "resnet26d", "resnetv2_50", "resnext26ts", "legacy_seresnet18",
        "skresnet18", "ecaresnet26t", "res2net50_14w_8s", "resnest14d", "densenet121", "dla34", "dpn48b",
        "efficientnet_b0", "efficientnet_lite0", "efficientnetv2_rw_t", "mobilenetv2_035", "mobilenetv3_small_050",
        "mobilenetv4_conv_small_035", "mixnet_s", "mnasnet_small", "tinynet_e", "lcnet_050", "fbnetc_100",
        "ghostnet_050",
        "ghostnetv2_100", "hardcorenas_a", "rexnet_100", "regnetx_002", "regnety_002", "regnetz_005", "repvgg_a0",
        "repghostnet_050", "mobileone_s0", "nf_regnet_b0", "nf_resnet26", "gernet_s",
        "cspresnet50", "darknet17", "selecsls42", "vovnet39a", "hrnet_w18_small", "hgnet_tiny", "hgnetv2_b0",
        "vgg11", "xception41", "tresnet_m", "gcresnext26ts",
        "starnet_s1", "fasternet_t0", "repvit_m0_9", "edgenext_xx_small", "mobilenetv1_100",
    )),
    *(timm_entry(name, 32, **SMALL) for name in (
        "vit_tiny_patch16_224", "deit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224",
    )),
    timm_entry("bat_resnext26ts", 256), timm_entry("botnet26t_256", 256), timm_entry("lambda_resnet26t", 256),
    timm_entry("cait_xxs24_224", 32, **SMALL), timm_entry("xcit_nano_12_p16_224", 32, **SMALL),
    timm_entry("mixer_s16_224", 64, img_size=64),
    timm_entry("gmixer_12_224", 64, img_size=64),
    timm_entry("resmlp_12_224", 64, img_size=64),
    timm_entry("gmlp_ti16_224", 64, img_size=64),
    timm_entry("swin_tiny_patch4_window7_224", 32, img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
               window_size=4),
    timm_entry("swinv2_tiny_window8_256", 32, img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
               window_size=4),
    timm_entry("convnext_atto", 64, **FOUR), timm_entry("convnextv2_atto", 64, **FOUR),
    timm_entry("inception_next_tiny", 64, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    timm_entry("poolformer_s12", 64),
    timm_entry("caformer_s18", 64),
    timm_entry("convformer_s18", 64),
    timm_entry("volo_d1_224", 64, img_size=64),
    timm_entry("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(2, 4, 4, 4)),
    timm_entry("focalnet_tiny_srf", 64),
    timm_entry("tiny_vit_5m_224", 224),
    timm_entry("pit_ti_224", 64, img_size=64), timm_entry("levit_128s", 64, img_size=64),
    timm_entry("coat_tiny", 64, img_size=64), timm_entry("convit_tiny", 32, **SMALL),
    timm_entry("crossvit_tiny_240", 240), timm_entry("twins_svt_small", 64, img_size=64),
    timm_entry("pvt_v2_b0", 64), timm_entry("mvitv2_tiny", 64, img_size=64), timm_entry("efficientformer_l1", 224),
    timm_entry("efficientvit_b0", 64), timm_entry("fastvit_t8", 64), timm_entry("mobilevit_xxs", 64),
    timm_entry("mobilevitv2_050", 64), timm_entry("visformer_tiny", 64, img_size=64), timm_entry("nest_tiny", 64,
    img_size=64),
    timm_entry("sequencer2d_s", 64, img_size=64, layers=(1, 1, 1, 1)),
    timm_entry("maxvit_rmlp_pico_rw_256", 64, img_size=64), timm_entry("coatnet_pico_rw_224", 64, img_size=64),
    timm_entry("hiera_tiny_224", 64, img_size=64), timm_entry("rdnet_tiny", 64),
]
PYTORCHCV = [
    *(cv_entry(name, 32) for name in (
        "resnet20_cifar10", "preresnet20_cifar10", "seresnet20_cifar10", "sepreresnet20_cifar10",
        "pyramidnet110_a48_cifar10",
        "densenet40_k12_cifar10", "wrn16_10_cifar10", "nin_cifar10", "xdensenet40_2_k24_bc_cifar10",
        "ror3_56_cifar10",
        "diaresnet20_cifar10", "diapreresnet20_cifar10", "rir_cifar10", "shakeshakeresnet20_2x16d_cifar10",
        "resnext29_32x4d_cifar10", "wrn20_10_1bit_cifar10", "fractalnet_cifar10",
    )),
    *(cv_entry(name, 224) for name in (
        "alexnet", "zfnet", "vgg11", "bn_vgg11b", "bninception", "resnet10", "resnet18_wd4", "preresnet10",
        "resnext14_16x4d",
        "seresnet10", "sepreresnet10", "seresnext50_32x4d", "senet16", "resnestabc14", "ibn_resnet50",
        "ibnb_resnet50",
        "ibn_densenet121", "airnet50_1x64d_r2", "airnext50_32x4d_r2", "bam_resnet18", "cbam_resnet18", "resattnet56",
        "sknet50", "scnet50", "regnetx002", "regnety002", "diaresnet10", "diracnet18v2", "densenet121",
        "condensenet74_c4_g4",
        "peleenet", "dla34", "dpn68", "darknet_tiny", "darknet19", "revnet38", "bagnet9",
        "squeezenet_v1_0", "sqnxt23_w1", "shufflenet_g1_wd4", "shufflenetv2_wd2", "shufflenetv2b_wd2",
        "menet108_8x1_g3",
        "mobilenet_wd4", "mobilenetb_wd4", "fdmobilenet_wd4", "mobilenetv2_wd4", "mobilenetv3_small_w7d20",
        "igcv3_wd4", "ghostnet", "mnasnet_b1", "darts", "proxylessnas_cpu", "nasnet_4a1056", "spnasnet",
        "efficientnet_b0",
        "mixnet_s", "isqrtcovresnet18", "tresnet_m", "hardnet39ds", "vovnet27s",
        "selecsls42", "hrnet_w18_small_v1", "fbnet_cb", "hardnet68", "dicenet_wd5",
    )),
    *(cv_entry(name, 299) for name in ("xception", "inceptionv3", "inceptionv4", "inceptionresnetv2")),
    cv_entry("lednet_cityscapes", 256), cv_entry("sinet_cityscapes", 256),
    *(cv_entry(name, 224) for name in (
        "enet_cityscapes", "segnet_cityscapes", "esnet_cityscapes",
        "erfnet_cityscapes", "edanet_cityscapes", "fpenet_cityscapes", "ctxnet_cityscapes",
        "cgnet_cityscapes", "dabnet_cityscapes", "linknet_cityscapes", "unet_cityscapes",
    )),
    cv_entry("bisenet_resnet18_celebamaskhq", 224, in_size=(224, 224)),
]
TORCHVISION = [
    *(vision_entry(name) for name in (
        "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "mnasnet0_5",
        "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50",
        "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "vgg11", "vgg11_bn", "wide_resnet50_2", "swin_t",
        "swin_v2_t",
    )),
    *(vision_entry(name, weights_backbone=None) for name in (
        "fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large",
    )),
    vision_entry("inception_v3", 299), vision_entry("vit_b_16", 224), vision_entry("maxvit_t", 224),
]
SEGMENTATION = [
    *(segmenting(name) for name in (
        "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "DeepLabV3", "DeepLabV3Plus",
    )),
    segmenting("PAN", size=128), segmenting("PSPNet"), segmenting("UPerNet"), segmenting("Segformer"),
    segmenting("Unet", "mobilenet_v2"),
    segmenting("Unet", "efficientnet-b0"),
    segmenting("FPN", "mit_b0"),
]
# fmt: on
ENTRIES = [*TIMM, *PYTORCHCV, *TORCHVISION, *SEGMENTATION]
