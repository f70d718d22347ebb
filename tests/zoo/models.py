"""The list of architectures, with small configurations, random weights and example inputs. A maker imports its package."""

# fmt: off
# mypy: disable-error-code="attr-defined,import-not-found,import-untyped,no-any-return,no-untyped-call"
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from types import MethodType
from typing import Any

#: A module, its example inputs, and options of `export_torch`.
Made = tuple[Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture of the zoo."""

    name: str
    #: Package of the architecture.
    package: str
    make: Callable[[], Made]
    #: For an architecture whose first export is refused: the change that the error or a page recommends, in words, and a
    #: function that makes the changed model.
    change: tuple[str, Callable[[], Made]] | None = None
    #: Reason why this architecture cannot be compiled at all, or empty.
    dynamic: str = ""


def words(text: str) -> list[str]:
    """Return the words of a text. Names in a line are easier to read than a list of strings."""
    return text.split()


def entries() -> list[Entry]:
    """Return the list of architectures. Their names are unique."""
    made = [*_timm(), *_torchvision(), *_transformers(), *_others()]
    assert len({entry.name for entry in made}) == len(made)
    return made


def _timm() -> Iterator[Entry]:
    for name in TIMM.split():
        yield Entry(f"timm {name}", "timm", partial(make_timm, name))


TIMM = """
    vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 convnext_atto convnextv2_atto resnet18 resnetv2_50 resnext26ts legacy_seresnet18 ecaresnet26t
    skresnet18 resnest14d res2net50_14w_8s dla34 dpn48b densenet121 nfnet_l0 efficientnet_lite0 tf_efficientnetv2_b0
    mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 mobilevit_xxs mobilevitv2_050
    fastvit_t8 ghostnet_050 ghostnetv2_100 ghostnetv3_050 repghostnet_050 repvgg_a0 repvit_m0_9 regnetx_002 regnety_002
    regnetz_005 rexnet_100 hardcorenas_a hgnetv2_b0 hrnet_w18_small inception_next_atto inception_v4 xception41
    ese_vovnet19b_dw selecsls42 sebotnet33ts_256 halonet26t lambda_resnet26t lcnet_035 levit_128s mixer_s32_224
    resmlp_12_224 gmlp_ti16_224 mvitv2_tiny nest_tiny pit_ti_224 poolformer_s12 caformer_s18 pvt_v2_b0 tiny_vit_5m_224
    tinynet_e tnt_s_patch16_224 tresnet_m twins_svt_small visformer_tiny volo_d1_224 xcit_nano_12_p16_224 cait_xxs24_224
    coat_tiny coatnet_nano_rw_224 maxvit_tiny_rw_224 crossvit_tiny_240 cspresnet50 convit_tiny davit_tiny
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224
    focalnet_tiny_srf gcvit_xxtiny gernet_s hiera_tiny_224 hieradet_small mambaout_femto nextvit_small sequencer2d_s
    shvit_s1 starnet_s1 swiftformer_xs vitamin_small_224 vit_relpos_small_patch16_224 flexivit_small
    naflexvit_base_patch16_gap fasternet_t0 rdnet_tiny csatv2 mnasnet_050 mixnet_s bat_resnext26ts
"""


def make_timm(name: str) -> Made:
    """Make a network of timm. Its input is an image of 128 x 128 pixels, or of the network's own size if it refuses this."""
    import timm
    import torch

    model = timm.create_model(name, pretrained=False).eval()
    side = model.default_cfg["input_size"][-1]
    for pixels in (128, side):
        image = torch.rand(1, 3, pixels, pixels)
        with suppress(Exception):  # The network may accept only images of its own size.
            model(image)
            break
    return model, {_first(model): image}, {}


def _first(module: Any) -> str:
    return next(iter(inspect.signature(module.forward).parameters))


def _torchvision() -> Iterator[Entry]:
    for name, shape in TORCHVISION.items():
        yield Entry(f"torchvision {name}", "torchvision", partial(make_torchvision, name, shape))
    for name in words("fasterrcnn_mobilenet_v3_large_320_fpn retinanet_resnet50_fpn fcos_resnet50_fpn ssdlite320_mobilenet_v3_large"):
        make = partial(make_torchvision, name, (1, 3, 320, 320))
        yield Entry(f"torchvision {name}", "torchvision", make, dynamic="the number of detections depends on the image")
        yield Entry(f"torchvision backbone of {name}", "torchvision", partial(_backbone, name))
    for name in ("DeformConv2d", "RoIAlign"):
        yield Entry(f"torchvision {name}", "torchvision", partial(_layer, name))


TORCHVISION: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        words(
            "resnet18 resnext50_32x4d densenet121 squeezenet1_0 googlenet mobilenet_v2 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 efficientnet_b0 regnet_y_400mf regnet_x_400mf convnext_tiny alexnet"
        ),
        (1, 3, 96, 96),
    ),
    **dict.fromkeys(words("inception_v3 fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"), (1, 3, 128, 128)),
    **dict.fromkeys(words("vit_b_32 swin_t swin_v2_t maxvit_t"), (1, 3, 224, 224)),
    **dict.fromkeys(words("r3d_18 mc3_18 r2plus1d_18 swin3d_t"), (1, 3, 8, 64, 64)),
    "s3d": (1, 3, 16, 224, 224),
    "mvit_v1_b": (1, 3, 16, 224, 224),
}


def make_torchvision(name: str, shape: tuple[int, ...]) -> Made:
    """Make a network of torchvision."""
    import torch
    import torchvision

    options: dict[str, Any] = {"weights_backbone": None} if "fpn" in name or "320" in name or shape[-1] == 128 else {}
    if name == "inception_v3":
        options = {"init_weights": False}
    if name == "googlenet":
        options = {"init_weights": False}
    module = torchvision.models.get_model(name, weights=None, **options).eval()
    return module, {_first(module): torch.rand(shape)}, {}


def _backbone(name: str) -> Made:
    import torch

    module = make_torchvision(name, (1, 3, 320, 320))[0].backbone
    return module, {_first(module): torch.rand(1, 3, 320, 320)}, {}


def _layer(name: str) -> Made:
    import torch
    from torchvision import ops

    class Deformed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets, self.conv = (torch.nn.Conv2d(3, 18, 3, padding=1), ops.DeformConv2d(3, 8, 3, padding=1))

        def forward(self, x: Any) -> Any:
            return self.conv(x, self.offsets(x))

    class Aligned(torch.nn.Module):
        def forward(self, x: Any, boxes: Any) -> Any:
            rois = torch.cat([torch.arange(len(boxes))[:, None], boxes], 1)
            return ops.roi_align(x, rois, 7, 0.5, 2, True)

    image = torch.rand(1, 3, 32, 32)
    if name == "DeformConv2d":
        return Deformed().eval(), {"x": image}, {}
    return Aligned().eval(), {"x": image, "boxes": torch.tensor([[3.0, 4, 40, 50]])}, {}


#: Model types of transformers, by the inputs that they take.
TEXT = """
    albert bert big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert
    flaubert fnet funnel gte ibert longformer luke markuplm megatron-bert mobilebert modernbert mpnet nomic_bert nystromformer
    rembert roberta roberta-prelayernorm roformer squeezebert splinter xlm xlm-roberta xlnet yoso
"""
CAUSAL = """
    gpt2 gpt_neo gpt_neox gptj gpt_bigcode openai-gpt bloom opt codegen ctrl falcon llama mistral mixtral qwen2 qwen2_moe
    qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3_text phi phi3 phimoe stablelm starcoder2 olmo olmo2 olmoe cohere cohere2
    granite granitemoe mamba mamba2 falcon_mamba rwkv recurrent_gemma jamba bamba deepseek_v2 deepseek_v3 glm glm4 gpt_oss
    exaone4 smollm3 nemotron persimmon mpt dbrx jetmoe helium biogpt xglm ernie4_5 lfm2 minimax
    modernbert-decoder xlstm
"""
SEQ2SEQ = """
    bart mbart blenderbot blenderbot-small pegasus pegasus_x t5 mt5 umt5 longt5 switch_transformers m2m_100 marian prophetnet
    bigbird_pegasus led plbart
"""
VISION = """
    vit deit beit data2vec-vision dinov2 dinov2_with_registers dinov3_vit swin swinv2 convnext convnextv2 resnet regnet
    mobilevit mobilevitv2 mobilenet_v1 mobilenet_v2 poolformer pvt pvt_v2 segformer cvt efficientnet focalnet hiera levit
    vit_mae vit_msn ijepa bit swiftformer clip_vision_model siglip_vision_model
"""
WAVE = "wav2vec2 wav2vec2-conformer hubert wavlm unispeech unispeech-sat sew sew-d data2vec-audio"
#: Model types of transformers, by the class that adds a head to them.
HEADS = {
    "AutoModelForObjectDetection": "detr conditional_detr deformable_detr rt_detr rt_detr_v2 d_fine yolos table-transformer",
    "AutoModelForSemanticSegmentation": "upernet mobilenet_v2 dpt",
    "AutoModelForUniversalSegmentation": "mask2former maskformer",
    "AutoModelForDepthEstimation": "glpn depth_anything",
    "AutoModelForImageToImage": "swin2sr",
}
PAIRED = "clip siglip chinese_clip altclip blip flava git vilt bridgetower groupvit align clipseg owlvit owlv2"
VIDEO = "timesformer videomae vivit"

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "decoder_num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 8),
    "vocab_size": 128,
    "projection_dim": 16,
    "moe_intermediate_size": 32,
    "image_size": 64,
    "num_experts_per_tok": 2,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
}
LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
#: Further attributes of small configurations by model type. A path with a dot names an attribute of a part.
MORE: Mapping[str, Mapping[str, Any]] = {
    **{kind: {"image_size": 224, "embed_dim": 24} for kind in words("swin swinv2 donut-swin maskformer-swin")},
    **{kind: {"num_hidden_layers": 4} for kind in words("convnext convnextv2")},
    # With the default of 0.01, the image hardly affects the scores that select queries, so rounding errors would decide.
    **{kind: {"num_queries": 20, "initializer_range": 0.1} for kind in words("rt_detr rt_detr_v2 d_fine")},
    # With the default of 0.02, the image does not affect any output.
    "mobilevit": {"initializer_range": 0.1},
    "align": {"projection_dim": 640, "initializer_range": 0.1, "vision_config.initializer_range": 0.1},
    "audio-spectrogram-transformer": {"max_length": 128},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
    "bridgetower": {"hidden_size": 64, "vision_config.hidden_size": 64, "text_config.hidden_size": 64},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "deformable_detr": {"image_size": 128},
    "depth_anything": {
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [1, 2, 3, 4],
        "backbone_config.reshape_hidden_states": False,
        "reassemble_hidden_size": 32,
    },
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "encodec": {"codebook_dim": 32},
    "esm": {"vocab_size": 128, "pad_token_id": 1},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [1, 1], "block_repeats": [1, 1], "d_inner": 64},
    **{kind: {"rotary_dim": 8} for kind in words("codegen gptj")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32},
    "sam": {
        "vision_config.output_channels": 32,
        "vision_config.num_pos_feats": 16,
        "prompt_encoder_config.image_embedding_size": 4,
    },
    "siglip_text_model": {"projection_size": 32},
    "swin2sr": {"embed_dim": 24},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2},
}


def _transformers() -> Iterator[Entry]:
    def entry(kind: str, auto: str, inputs: Any, word: str = "") -> Entry:
        name = f"transformers {kind}{word}"
        return Entry(name, "transformers", partial(make_transformers, kind, auto, inputs), CHANGES.get(name))

    yield from (entry(kind, "AutoModel", "text") for kind in TEXT.split())
    yield from (entry(kind, "AutoModelForCausalLM", "text") for kind in CAUSAL.split())
    yield from (entry(kind, "AutoModelForSeq2SeqLM", "seq2seq") for kind in SEQ2SEQ.split())
    yield from (entry(kind, "AutoModel", "image") for kind in VISION.split())
    yield from (entry(kind, "AutoModel", "wave") for kind in WAVE.split())
    for auto, kinds in HEADS.items():
        yield from (entry(kind, auto, "image", f" {auto[12:]}") for kind in kinds.split())
    yield from (entry(kind, "AutoModel", "pair") for kind in PAIRED.split())
    yield from (entry(kind, "AutoModel", "video") for kind in VIDEO.split())
    yield entry("bert", "AutoModelForSequenceClassification", "types", " classifier with token types")
    yield entry("layoutlm", "AutoModel", "boxes")
    yield entry("whisper", "AutoModel", "mel")
    yield entry("audio-spectrogram-transformer", "AutoModel", "spectrogram")
    yield entry("encodec", "AutoModel", "sound")
    yield entry("dac", "AutoModel", "sound")
    yield entry("patchtst", "AutoModel", "series")
    yield entry("patchtsmixer", "AutoModel", "series")
    yield entry("sam", "AutoModel", "points")


def make_transformers(kind: str, auto: str, inputs: str) -> Made:
    """Make a model of transformers from a small configuration."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    shrink(config, kind)
    module = getattr(transformers, auto).from_config(config).eval()
    ids = torch.tensor([[3, 17, 42, 99, 8, 25, 60, 2]])
    mask = torch.ones_like(ids)
    side = _side(config)
    image = torch.rand(1, 3, side, side)
    wave = torch.randn(1, 4000)
    examples: Mapping[str, Any] = {
        "text": {"input_ids": ids, "attention_mask": mask},
        "types": {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)},
        "boxes": {"input_ids": ids, "bbox": torch.tensor([[[1, 2, 30, 40]] * 4 + [[5, 6, 50, 60]] * 4])},
        "seq2seq": {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids},
        "image": {"pixel_values": image},
        "wave": {"input_values": wave},
        "sound": {"input_values": wave[:, None, :3200]},
        "video": {"pixel_values": torch.rand(1, getattr(config, "num_frames", 8), 3, side, side)},
        "pair": {"input_ids": ids, "attention_mask": mask, "pixel_values": image},
        "mel": {
            "input_features": torch.randn(1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)),
            "decoder_input_ids": ids,
        },
        "spectrogram": {"input_values": torch.randn(1, 128, 128)},
        "series": {"past_values": torch.randn(1, getattr(config, "context_length", 32), 1)},
        "points": {"pixel_values": image, "input_points": torch.rand(1, 1, 2, 2) * side},
    }[inputs]
    taken = inspect.signature(module.forward).parameters
    return module, {name: value for name, value in examples.items() if name in taken}, {}


def shrink(config: Any, kind: str) -> None:
    """Make a configuration of transformers small, and also the configurations that it contains."""
    import transformers

    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            with suppress(AttributeError, NotImplementedError):  # Some configurations derive this value.
                setattr(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= 128:
            setattr(config, name, 1)
    depths = getattr(config, "depths", None)
    if isinstance(depths, list | tuple):
        config.depths = type(depths)([1] * len(depths))
    if isinstance(getattr(config, "layer_types", None), list):
        with suppress(AttributeError):  # Some configurations derive the types.
            config.layer_types = config.layer_types[:2]
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            shrink(part, part.model_type)
    for path, value in MORE.get(kind, {}).items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, config), name, value)


def _side(config: Any) -> int:
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if size is not None:
            return size[0] if isinstance(size, list | tuple) else int(size)
    return 64


def _kept(make: Callable[[], Made], *names: str) -> Made:
    module, examples, options = make()
    return module, examples, {**options, "outputs": names}


def _embeddings(kind: str) -> tuple[str, Callable[[], Made]]:
    make = partial(make_transformers, kind, "AutoModel", "pair")
    return "--outputs image_embeds,text_embeds", partial(_kept, make, "image_embeds", "text_embeds")


def _padded() -> Made:
    import torch
    from torch import nn

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: Any, lengths: Any) -> Any:
            return self.lstm(x)[0] * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]

    return Padded().eval(), {"x": torch.randn(1, 6, 16), "lengths": torch.tensor([6])}, {}


def _looped() -> Made:
    import torch
    import torch_geometric.nn as graphs

    edges = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 1, 2, 3], [1, 2, 3, 0, 1, 0, 0, 1, 2, 3]])
    module = graphs.GCN(8, 16, 2, 4, add_self_loops=False)
    return module.eval(), {"x": torch.randn(4, 8), "edge_index": edges}, {"batch_sizes": [], "batch_axis": None}


def _unmasked(kind: str, auto: str, inputs: str) -> Made:
    module, examples, options = make_transformers(kind, auto, inputs)
    return module, {name: value for name, value in examples.items() if name != "attention_mask"}, options


def _all_experts(kind: str) -> Made:
    """Make a model that computes all experts, and then selects some of their results."""
    import torch

    auto, inputs = ("AutoModelForSeq2SeqLM", "seq2seq") if kind == "switch_transformers" else ("AutoModelForCausalLM", "text")
    module, examples, options = make_transformers(kind, auto, inputs)

    def switch(experts: Any, hidden_states: Any, selected_experts: Any, routing_weights: Any) -> Any:
        """Compute all experts.

        `selected_experts` is one-hot [tokens, 1, experts]. An expert's result is multiplied by its token's weight.
        """
        results = torch.stack([expert(hidden_states) for expert in experts.values()], -2)
        return torch.where(selected_experts.mT > 0, results * routing_weights[:, None], 0).sum(-2)

    def dbrx(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        rows = hidden_states.reshape(-1, experts.hidden_size)
        shape = (-1, experts.ffn_hidden_size, experts.hidden_size)
        parts = zip(*(weight.view(shape) for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)), strict=True)
        results = torch.stack([experts.mlp(rows, *part) for part in parts], 1)
        chosen = top_k_index[..., None] == torch.arange(results.shape[1])
        return torch.where(chosen, top_k_weights[..., None], 0).sum(1)[:, None].matmul(results)[:, 0].view(hidden_states.shape)

    def jetmoe_gates(router: Any, hidden_states: Any) -> Any:
        """Return the same values as the original function, except that the sizes are a tensor."""
        logits = router.layer(hidden_states).float()
        top, experts = logits.topk(router.top_k, dim=1)
        order = experts.flatten().sort(0).indices
        sizes = (experts.flatten()[:, None] == torch.arange(router.num_experts)).sum(0)
        return order, order // router.top_k, top.softmax(1).flatten()[order], sizes, logits

    def jetmoe(experts: Any, inputs: Any, sizes: Any) -> Any:
        rows = torch.arange(len(inputs))
        results = torch.stack([inputs @ weight.T for weight in experts.weight], 1)
        return results[rows, (rows[:, None] >= sizes.cumsum(0)).sum(1)]

    forwards: dict[str, Any] = {
        "DbrxExperts": dbrx,
        "JetMoeParallelExperts": jetmoe,
        "JetMoeTopKGating": jetmoe_gates,
        "SwitchTransformersExperts": switch,
    }
    for part in module.modules():
        if forward := forwards.get(type(part).__name__):
            part.forward = MethodType(forward, part)
    return module, examples, options


def _attention_without_loops() -> Made:
    import torch_geometric.nn as graphs

    return graphs.GAT(8, 16, 2, 4, add_self_loops=False).eval(), *_looped()[1:]


def _whole_sounds(name: str) -> Made:
    import torch
    from torch import nn

    module, examples, options = OTHERS["torchaudio", name]()
    (length,) = examples["lengths"].tolist()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, input: Any) -> Any:
            return self.module(input, torch.full(input.shape[:1], length))[0]

    return Whole().eval(), {"input": examples["input"]}, options


def _given_noise() -> Made:
    import torch

    module, examples, options = make_transformers("vit_mae", "AutoModel", "image")
    config = module.config
    return module, {**examples, "noise": torch.rand(1, (config.image_size // config.patch_size) ** 2)}, options


UNMASKED = "leave out attention_mask, which the rows of one request length share"
EXPERTS = "compute all experts and choose with torch.where"
#: Changes by the name of the architecture. Each is what the error or a page recommends, and a function that makes the changed
#: model.
CHANGES: dict[str, tuple[str, Callable[[], Made]]] = {
    **{f"transformers {kind}": _embeddings(kind) for kind in words("clip siglip chinese_clip altclip blip groupvit align clipseg owlvit owlv2")},
    "transformers longformer": (UNMASKED, partial(_unmasked, "longformer", "AutoModel", "text")),
    "transformers led": (UNMASKED, partial(_unmasked, "led", "AutoModelForSeq2SeqLM", "seq2seq")),
    **{f"transformers {kind}": (EXPERTS, partial(_all_experts, kind)) for kind in words("dbrx jetmoe switch_transformers")},
    "transformers dac": ("--outputs audio_values", partial(_kept, partial(make_transformers, "dac", "AutoModel", "sound"), "audio_values")),
    "diffusers VQModel": ("--outputs sample", lambda: _kept(partial(_diffuser, "VQModel"), "sample")),
    "open_clip_torch ViT-B-32 of small layers": (
        "--outputs output_0,output_1",
        lambda: _kept(OTHERS["open_clip_torch", "ViT-B-32 of small layers"], "output_0", "output_1"),
    ),
    **{
        f"torchaudio {name}": ("leave out lengths, which the rows of one request length share", partial(_whole_sounds, name))
        for name in words("Conformer Emformer")
    },
    "transformers vit_mae": ("give noise as an input", _given_noise),
    "pytorch-tabnet TabNet": ("--outputs output_0", lambda: _kept(OTHERS["pytorch-tabnet", "TabNet"], "output_0")),
    "torch LSTM_packed": ("pad and mask, without packing", _padded),
    "torch_geometric GCN": ("pass self-loops as edges: add_self_loops=False", _looped),
    "torch_geometric GAT": ("pass self-loops as edges: add_self_loops=False", _attention_without_loops),
}


def _others() -> Iterator[Entry]:
    for (package, name), make in OTHERS.items():
        yield Entry(f"{package} {name}", package, make, CHANGES.get(f"{package} {name}"))


OTHERS: dict[tuple[str, str], Callable[[], Made]] = {}


def other(package: str, *names: str) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Return a decorator that adds a maker to the list. The maker takes a name, or nothing if there is only one name."""

    def enter(make: Callable[..., Made]) -> Callable[..., Made]:
        for name in names:
            OTHERS[package, name] = partial(make, name) if inspect.signature(make).parameters else make
        return make

    return enter


@other(
    "diffusers",
    *words(
        "UNet2DModel UNet2DConditionModel ControlNetModel AutoencoderKL AutoencoderTiny VQModel DiTTransformer2DModel PixArtTransformer2DModel SD3Transformer2DModel FluxTransformer2DModel UNet1DModel PriorTransformer"
    ),
)
def _diffuser(name: str) -> Made:
    import diffusers
    import torch

    sample, step = torch.randn(1, 4, 16, 16), torch.tensor([10])
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    text = {"encoder_hidden_states": torch.randn(1, 8, 32)}
    cases: dict[str, Any] = {
        "UNet2DModel": (
            {
                **blocks,
                "sample_size": 16,
                "in_channels": 4,
                "out_channels": 4,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            },
            {"sample": sample, "timestep": step},
        ),
        "UNet2DConditionModel": (
            {**blocks, "sample_size": 16, "cross_attention_dim": 32, "down_block_types": down, "up_block_types": up, "attention_head_dim": 8},
            {"sample": sample, "timestep": step, **text},
        ),
        "ControlNetModel": (
            {**blocks, "cross_attention_dim": 32, "down_block_types": down, "attention_head_dim": 8, "conditioning_embedding_out_channels": (16, 32)},
            {"sample": sample, "timestep": step, **text, "controlnet_cond": torch.rand(1, 3, 32, 32)},
        ),
        "AutoencoderKL": (
            {**blocks, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4},
            {"sample": torch.rand(1, 3, 32, 32)},
        ),
        "AutoencoderTiny": ({}, {"sample": torch.rand(1, 3, 32, 32)}),
        "VQModel": (
            {**blocks, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
            {"sample": torch.rand(1, 3, 32, 32)},
        ),
        "DiTTransformer2DModel": (
            {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16},
            {"hidden_states": sample, "timestep": step, "class_labels": torch.tensor([5])},
        ),
        "PixArtTransformer2DModel": (
            {
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "in_channels": 4,
                "num_layers": 2,
                "sample_size": 16,
                "cross_attention_dim": 32,
                "caption_channels": 32,
                "use_additional_conditions": False,
            },
            {"hidden_states": sample, "timestep": step, **text},
        ),
        "SD3Transformer2DModel": (
            {
                "sample_size": 16,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 16,
                "out_channels": 4,
            },
            {"hidden_states": sample, "timestep": step, **text, "pooled_projections": torch.randn(1, 16)},
        ),
        "FluxTransformer2DModel": (
            {
                "in_channels": 4,
                "num_layers": 1,
                "num_single_layers": 1,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": (4, 4, 8),
            },
            {"hidden_states": torch.randn(1, 16, 4), "timestep": torch.tensor([0.5]), **text, "pooled_projections": torch.randn(1, 32)},
        ),
        "UNet1DModel": (
            {"sample_size": 64, "in_channels": 2, "extra_in_channels": 64, "block_out_channels": (32, 32, 64)},
            {"sample": torch.randn(1, 2, 64), "timestep": step},
        ),
        "PriorTransformer": (
            {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 32, "num_embeddings": 8},
            {"hidden_states": torch.randn(1, 32), "timestep": step, "proj_embedding": torch.randn(1, 32), **text},
        ),
    }
    options, examples = cases[name]
    module = getattr(diffusers, name)(**options).eval()
    return _placed(module) if name.startswith("Flux") else module, dict(examples), {}


def _placed(flux: Any) -> Any:
    """Return a module that gives Flux the positions of its tokens. All rows of a batch have the same positions."""
    import torch

    class Placed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flux = flux

        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, pooled_projections: Any) -> Any:
            places = {"img_ids": torch.ones(hidden_states.shape[1], 3), "txt_ids": torch.zeros(encoder_hidden_states.shape[1], 3)}
            return self.flux(hidden_states, encoder_hidden_states, pooled_projections, timestep, **places)

    return Placed().eval()


@other("segmentation-models-pytorch", *words("Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3Plus PAN UPerNet Segformer DPT"))
def _smp(name: str) -> Made:
    import segmentation_models_pytorch as smp
    import torch

    encoder = "tu-vit_tiny_patch16_224" if name == "DPT" else "resnet18"
    side = {"DPT": 224, "PAN": 128}.get(name, 64)
    model = getattr(smp, name)(encoder_name=encoder, encoder_weights=None, classes=3).eval()
    return model, {"x": torch.rand(1, 3, side, side)}, {}


@other(
    "torchaudio",
    *words(
        "Conformer ConvTasNet Wav2Letter DeepSpeech WaveRNN wav2vec2_base hubert_base hdemucs_low MelSpectrogram MFCC Spectrogram Tacotron2 Emformer SquimObjective"
    ),
)
def _torchaudio(name: str) -> Made:
    import torch
    import torchaudio

    models, transforms = torchaudio.models, torchaudio.transforms
    wave = torch.randn(1, 4000)
    lengths = torch.tensor([20])
    cases: dict[str, Any] = {
        "Conformer": lambda: (models.Conformer(16, 4, 32, 2, 7), {"input": torch.randn(1, 20, 16), "lengths": lengths}),
        "ConvTasNet": lambda: (
            models.ConvTasNet(enc_num_feats=64, msk_num_feats=32, msk_num_hidden_feats=64, msk_num_layers=3, msk_num_stacks=2),
            {"input": wave[:, None]},
        ),
        "Wav2Letter": lambda: (models.Wav2Letter(40, "mfcc", 13), {"x": torch.randn(1, 13, 60)}),
        "DeepSpeech": lambda: (models.DeepSpeech(26, 64), {"x": torch.randn(1, 1, 20, 26)}),
        "WaveRNN": lambda: (
            models.WaveRNN([5, 5, 8], 16, 200, n_res_block=2, n_rnn=32, n_fc=32, n_hidden=16, n_output=16),
            {"waveform": torch.randn(1, 1, 1200), "specgram": torch.randn(1, 1, 128, 10)},
        ),
        "wav2vec2_base": lambda: (
            models.wav2vec2_model("group_norm", [(32, 10, 5), (32, 3, 2)], False, 32, 0.0, 9, 4, 2, 4, 0.0, 64, 0.0, 0.0, False, 0.0, 29),
            {"waveforms": wave},
        ),
        "hubert_base": lambda: (models.hubert_base(aux_num_out=29), {"waveforms": wave}),
        "hdemucs_low": lambda: (models.HDemucs(["a", "b"], channels=8, depth=5, nfft=1024), {"input": torch.randn(1, 2, 8000)}),
        "MelSpectrogram": lambda: (transforms.MelSpectrogram(n_fft=256, n_mels=20), {"waveform": wave}),
        "MFCC": lambda: (transforms.MFCC(melkwargs={"n_fft": 256, "n_mels": 40}), {"waveform": wave}),
        "Spectrogram": lambda: (transforms.Spectrogram(256), {"waveform": wave}),
        "Tacotron2": lambda: (
            models.Tacotron2(n_symbol=20),
            {
                "tokens": torch.tensor([[1, 2, 3, 4]]),
                "token_lengths": torch.tensor([4]),
                "mel_specgram": torch.randn(1, 80, 12),
                "mel_specgram_lengths": torch.tensor([12]),
            },
        ),
        "Emformer": lambda: (models.Emformer(16, 4, 32, 2, 4, right_context_length=2), {"input": torch.randn(1, 22, 16), "lengths": lengths}),
        "SquimObjective": lambda: (models.squim_objective_base(), {"x": torch.randn(1, 8000)}),
    }
    module, examples = cases[name]()
    return module.eval(), examples, {}


@other("vit-pytorch", *words("ViT SimpleViT CaiT T2TViT CCT CrossFormer MaxViT NesT MobileViT LeViT XCiT"))
def _vit_pytorch(name: str) -> Made:
    import importlib

    import torch

    cases: dict[str, Any] = {
        "ViT": ("vit", {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}),
        "SimpleViT": ("simple_vit", {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}),
        "CaiT": ("cait", {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "cls_depth": 1, "heads": 4, "mlp_dim": 64}),
        "T2TViT": ("t2t", {"image_size": 64, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64, "t2t_layers": ((7, 4), (3, 2))}),
        "CCT": (
            "cct",
            {"img_size": 64, "embedding_dim": 32, "n_conv_layers": 2, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 10},
        ),
        "CrossFormer": (
            "crossformer",
            {"num_classes": 10, "dim": (32, 64, 64, 128), "depth": (1, 1, 1, 1), "global_window_size": (8, 4, 2, 1), "local_window_size": 7},
        ),
        "MaxViT": ("max_vit", {"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 7}),
        "NesT": (
            "nest",
            {"image_size": 64, "patch_size": 4, "dim": 32, "heads": 2, "num_hierarchies": 3, "block_repeats": (1, 1, 1), "num_classes": 10},
        ),
        "MobileViT": (
            "mobile_vit",
            {"image_size": (64, 64), "dims": [32, 48, 64], "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64], "num_classes": 10},
        ),
        "LeViT": ("levit", {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (32, 64), "depth": 1, "heads": (2, 4), "mlp_mult": 2}),
        "XCiT": ("xcit", {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "cls_depth": 1, "heads": 4, "mlp_dim": 64}),
    }
    file, options = cases[name]
    side = 224 if name in ("CrossFormer", "MaxViT") else 64
    module = getattr(importlib.import_module(f"vit_pytorch.{file}"), name)(**options).eval()
    return module, {_first(module): torch.rand(1, 3, side, side)}, {}


@other("x-transformers", *words("decoder encoder rotary alibi"))
def _x_transformers(name: str) -> Made:
    import torch
    import x_transformers as x

    kind = x.Encoder if name == "encoder" else x.Decoder
    options = {"rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True}}.get(name, {})
    module = x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=kind(dim=32, depth=2, heads=4, **options))
    return module.eval(), {"x": torch.tensor([[3, 17, 42, 99, 8, 25, 60, 2]])}, {}


@other("monai", *words("UNet BasicUNet SegResNet UNETR SwinUNETR DynUNet VNet AttentionUnet DenseNet121 HighResNet"))
def _monai(name: str) -> Made:
    import torch
    from monai.networks import nets

    cases: dict[str, Any] = {
        "UNet": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2)}, (1, 1, 32, 32, 32)),
        "BasicUNet": ({"spatial_dims": 2, "features": (8, 8, 16, 16, 32, 8)}, (1, 1, 64, 64)),
        "SegResNet": ({"spatial_dims": 3, "init_filters": 8}, (1, 1, 32, 32, 32)),
        "UNETR": (
            {"in_channels": 1, "out_channels": 2, "img_size": (32, 32, 32), "hidden_size": 48, "mlp_dim": 64, "num_heads": 4},
            (1, 1, 32, 32, 32),
        ),
        "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2}, (1, 1, 64, 64)),
        "DynUNet": (
            {
                "spatial_dims": 2,
                "in_channels": 1,
                "out_channels": 2,
                "kernel_size": (3, 3, 3),
                "strides": (1, 2, 2),
                "upsample_kernel_size": (2, 2),
                "filters": (8, 16, 32),
            },
            (1, 1, 64, 64),
        ),
        "VNet": ({"spatial_dims": 3}, (1, 1, 32, 32, 32)),
        "AttentionUnet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16), "strides": (2,)}, (1, 1, 64, 64)),
        "DenseNet121": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 1, 64, 64)),
        "HighResNet": ({"spatial_dims": 3}, (1, 1, 16, 16, 16)),
    }
    options, shape = cases[name]
    module = getattr(nets, name)(**options).eval()
    return module, {_first(module): torch.rand(shape)}, {}


def _all_pairs(pos: Any, batch: Any) -> tuple[Any, Any]:
    """Return the edges between all atoms, and their lengths. SchNet's own search for edges needs another package."""
    import torch

    edges = torch.tensor([(i, j) for i in range(len(pos)) for j in range(len(pos)) if i != j]).T
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


@other("torch_geometric", *words("GCN GAT GraphSAGE GIN PNA SchNet"))
def _graphs(name: str) -> Made:
    import torch
    import torch_geometric.nn as graphs

    edges = torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 3, 0, 1, 0]])
    if name == "SchNet":
        module = graphs.SchNet(32, 32, 2, interaction_graph=_all_pairs)
        return (module.eval(), {"z": torch.tensor([6, 1, 1, 8]), "pos": torch.randn(4, 3)}, {"batch_sizes": [], "batch_axis": None})
    options = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 2, 2])} if name == "PNA" else {}
    module = getattr(graphs, name)(8, 16, 2, 4, **options)
    return (module.eval(), {"x": torch.randn(4, 8), "edge_index": edges}, {"batch_sizes": [], "batch_axis": None})


@other("torch", *words("GRU LSTM LSTM_packed Transformer TransformerEncoder MultiheadAttention Conv1d_causal EmbeddingBag"))
def _torch(name: str) -> Made:
    import torch
    from torch import nn

    x = torch.randn(1, 6, 16)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    cases: dict[str, Any] = {
        "GRU": lambda: (nn.GRU(16, 8, 2, batch_first=True), {"input": x}),
        "LSTM": lambda: (nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True), {"input": x}),
        "LSTM_packed": lambda: (Packed(), {"x": x, "lengths": torch.tensor([6])}),
        "Transformer": lambda: (nn.Transformer(16, 4, 1, 1, 32, batch_first=True), {"src": x, "tgt": x}),
        "TransformerEncoder": lambda: (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
            {"src": x, "src_key_padding_mask": torch.zeros(1, 6, dtype=torch.bool)},
        ),
        "MultiheadAttention": lambda: (nn.MultiheadAttention(16, 4, batch_first=True), {"query": x, "key": x, "value": x}),
        "Conv1d_causal": lambda: (nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(6, 8, 3), nn.GLU(1)), {"input": x}),
        "EmbeddingBag": lambda: (nn.EmbeddingBag(50, 8, mode="mean"), {"input": torch.tensor([[3, 7, 9]])}),
    }
    module, examples = cases[name]()
    return module.eval(), examples, {}


@other("peft", "LoRA on bert", "LoRA on llama")
def _peft(name: str) -> Made:
    import peft

    kind = name.split()[-1]
    module, examples, options = make_transformers(kind, "AutoModel", "text")
    targets = ["query", "value"] if kind == "bert" else ["q_proj", "v_proj"]
    return peft.get_peft_model(module, peft.LoraConfig(target_modules=targets)).eval(), examples, options


@other("torchao", "int8 weight-only bert", "int8 weight-only resnet18")
def _torchao(name: str) -> Made:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = make_timm("resnet18") if "resnet" in name else make_transformers("bert", "AutoModel", "text")
    quantize_(made[0], Int8WeightOnlyConfig())
    return made


@other("sentence-transformers", "Pooling behind BERT, in a module of ours")
def _sentences() -> Made:
    import torch
    from sentence_transformers.sentence_transformer.modules.pooling import Pooling

    module, examples, _ = make_transformers("bert", "AutoModel", "text")
    pooling = Pooling(32)

    class Sentence(torch.nn.Module):
        """A model like SentenceTransformer. It takes tensors, while SentenceTransformer takes a mapping of features."""

        def __init__(self) -> None:
            super().__init__()
            self.bert, self.pooling = module, pooling

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            tokens = self.bert(input_ids, attention_mask).last_hidden_state
            return self.pooling({"token_embeddings": tokens, "attention_mask": attention_mask})["sentence_embedding"]

    return Sentence().eval(), examples, {}


@other("snac", "SNAC")
def _snac() -> Made:
    import snac
    import torch

    module = snac.SNAC(
        sampling_rate=8000,
        encoder_dim=8,
        encoder_rates=[2, 4],
        decoder_dim=32,
        decoder_rates=[4, 2],
        attn_window_size=None,
        codebook_size=16,
        codebook_dim=4,
        vq_strides=[2, 1],
        noise=False,
    )
    return module.eval(), {"audio_data": torch.randn(1, 1, 512)}, {}


@other("vocos", "Vocos backbone and head")
def _vocos() -> Made:
    import torch
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    module = torch.nn.Sequential(VocosBackbone(20, 32, 64, 2), ISTFTHead(32, 64, 16))
    return module.eval(), {"input": torch.randn(1, 20, 12)}, {}


@other("encodec", "EncodecModel")
def _encodec() -> Made:
    import encodec
    import torch

    return (encodec.EncodecModel.encodec_model_24khz(pretrained=False).eval(), {"x": torch.randn(1, 1, 4800)}, {})


@other("demucs", "HTDemucs")
def _demucs() -> Made:
    import torch
    from demucs.htdemucs import HTDemucs

    module = HTDemucs(["a", "b"], channels=8, depth=3, t_layers=1, nfft=512, segment=1, samplerate=8000, bottom_channels=0)
    return module.eval(), {"mix": torch.randn(1, 2, 8000)}, {}


@other("conformer", "Conformer")
def _conformer() -> Made:
    import torch
    from conformer import Conformer

    return Conformer(dim=32, depth=2, dim_head=8, heads=4).eval(), {"x": torch.randn(1, 20, 32)}, {}


@other("facenet-pytorch", "InceptionResnetV1")
def _facenet() -> Made:
    import torch
    from facenet_pytorch import InceptionResnetV1

    return InceptionResnetV1(pretrained=None).eval(), {"x": torch.rand(1, 3, 96, 96)}, {}


@other("efficientnet_pytorch", "EfficientNet-B0")
def _efficientnet() -> Made:
    import torch
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0").eval(), {"inputs": torch.rand(1, 3, 96, 96)}, {}


@other("open_clip_torch", "ViT-B-32 of small layers")
def _open_clip() -> Made:
    import open_clip
    import torch

    module = open_clip.CLIP(
        16,
        {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16},
        {"context_length": 8, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2},
    )
    return (module.eval(), {"image": torch.rand(1, 3, 64, 64), "text": torch.tensor([[3, 17, 42, 60, 8, 25, 99, 0]])}, {})


@other("fair-esm", "ESM-2")
def _esm() -> Made:
    import esm
    import torch

    module = esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=4)
    return module.eval(), {"tokens": torch.tensor([[0, 5, 6, 7, 8, 9, 10, 2]])}, {}


@other("neuraloperator", "FNO", "TFNO")
def _fno(name: str) -> Made:
    import torch
    from neuralop import models

    module = getattr(models, name)(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    return module.eval(), {"x": torch.randn(1, 1, 16, 16)}, {}


@other("pytorch-tabnet", "TabNet")
def _tabnet() -> Made:
    import torch
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(8, 3, group_attention_matrix=torch.eye(8)).eval(), {"x": torch.randn(1, 8)}, {}


@other("spandrel", *words("RRDBNet SwinIR SRVGGNetCompact DAT OmniSR"))
def _spandrel(name: str) -> Made:
    import importlib

    import torch

    cases: dict[str, Any] = {
        "RRDBNet": ("ESRGAN.__arch.RRDB", {"num_filters": 8, "num_blocks": 2}),
        "SwinIR": ("SwinIR.__arch.SwinIR", {"img_size": 32, "embed_dim": 24, "depths": [2], "num_heads": [2], "window_size": 8}),
        "SRVGGNetCompact": ("Compact.__arch.SRVGG", {"num_feat": 16, "num_conv": 4}),
        "DAT": ("DAT.__arch.DAT", {"img_size": 32, "embed_dim": 24, "split_size": [8, 8], "depth": [2], "num_heads": [2]}),
        "OmniSR": ("OmniSR.__arch.OmniSR", {"num_feat": 16, "res_num": 1, "window_size": 8}),
    }
    file, options = cases[name]
    module = getattr(importlib.import_module(f"spandrel.architectures.{file}"), name)(**options)
    return module.eval(), {"x": torch.rand(1, 3, 32, 32)}, {}


@other("speechbrain", *words("ECAPA_TDNN Xvector CRDNN ConvTasNet Conformer"))
def _speechbrain(name: str) -> Made:
    import importlib

    import torch

    lobes = "speechbrain.lobes.models"
    x = torch.randn(1, 40, 20)

    def lobe(file: str, kind: str, **options: Any) -> Any:
        return getattr(importlib.import_module(f"{lobes}.{file}"), kind)(**options)

    cases: dict[str, Any] = {
        "ECAPA_TDNN": lambda: (
            lobe("ECAPA_TDNN", "ECAPA_TDNN", input_size=20, lin_neurons=16, channels=[16] * 4 + [48], attention_channels=8),
            {"x": x},
        ),
        "Xvector": lambda: (lobe("Xvector", "Xvector", in_channels=20, tdnn_channels=[32] * 4 + [48], lin_neurons=16), {"x": x}),
        "CRDNN": lambda: (
            lobe("CRDNN", "CRDNN", input_size=20, cnn_blocks=1, cnn_channels=(8,), rnn_layers=1, rnn_neurons=16, dnn_neurons=16),
            {"x": x},
        ),
        "ConvTasNet": lambda: (
            lobe("conv_tasnet", "MaskNet", N=16, B=8, H=16, P=3, X=2, R=1, C=2, norm_type="gLN", causal=False),
            {"mixture_w": torch.randn(1, 16, 50)},
        ),
        "Conformer": lambda: (
            lobe("transformer.Conformer", "ConformerEncoder", num_layers=1, d_model=16, d_ffn=32, nhead=4, attention_type="regularMHA"),
            {"src": torch.randn(1, 20, 16)},
        ),
    }
    module, examples = cases[name]()
    return module.eval(), examples, {}


@other("torchxrayvision", "DenseNet")
def _xray() -> Made:
    import torch
    import torchxrayvision

    return torchxrayvision.models.DenseNet(weights=None).eval(), {"x": torch.rand(1, 1, 96, 96)}, {}


@other("perceiver-pytorch", "Perceiver", "PerceiverIO")
def _perceiver(name: str) -> Made:
    import perceiver_pytorch
    import torch

    if name == "PerceiverIO":
        module = perceiver_pytorch.PerceiverIO(
            depth=1, dim=16, queries_dim=16, num_latents=8, latent_dim=16, cross_dim_head=8, latent_dim_head=8, latent_heads=2
        )
        return module.eval(), {"data": torch.randn(1, 20, 16), "queries": torch.randn(1, 4, 16)}, {}
    module = perceiver_pytorch.Perceiver(
        num_freq_bands=2,
        depth=1,
        max_freq=4.0,
        input_channels=3,
        num_latents=8,
        latent_dim=16,
        latent_heads=2,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=5,
    )
    return module.eval(), {"data": torch.rand(1, 16, 16, 3)}, {}


@other("denoising-diffusion-pytorch", "Unet")
def _denoising() -> Made:
    import torch
    from denoising_diffusion_pytorch import Unet

    return (Unet(dim=16, dim_mults=(1, 2), flash_attn=False).eval(), {"x": torch.randn(1, 3, 32, 32), "time": torch.tensor([10])}, {})


@other("torchcrepe", "Crepe tiny")
def _crepe() -> Made:
    import torch
    import torchcrepe

    return torchcrepe.Crepe("tiny").eval(), {"x": torch.randn(1, 1024)}, {}


@other("kornia", *words("HardNet SOSNet TFeat DexiNed KeyNet"))
def _kornia(name: str) -> Made:
    import kornia.feature as features
    import torch
    from kornia.models.dexined import DexiNed

    module = DexiNed(pretrained=False) if name == "DexiNed" else getattr(features, name)(pretrained=False)
    shape = {"DexiNed": (1, 3, 64, 64), "KeyNet": (1, 1, 64, 64)}.get(name, (1, 1, 32, 32))
    return module.eval(), {_first(module): torch.rand(shape)}, {}


@other("ultralytics", *words("yolov8n yolo11n yolo11n-seg yolo11n-pose yolo11n-cls yolo11n-obb rtdetr-l"))
def _ultralytics(name: str) -> Made:
    import torch
    from ultralytics import RTDETR, YOLO

    kind = RTDETR if name == "rtdetr-l" else YOLO
    return kind(f"{name}.yaml").model.eval(), {"x": torch.rand(1, 3, 160, 160)}, {}


#: Packages that are installed and run only with `make zoo ZOO=--agpl`.
AGPL = ("ultralytics",)
