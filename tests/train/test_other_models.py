"""Configurations of models that are no causal language models: their classes, their batches, and their plans."""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from planner.predict.test_shallow import ALONE
from planner.rehearsed import run_peak
from selection import by_default

import zeroshard as zs
from zeroshard.cli.main import main
from zeroshard.errors import ModelError
from zeroshard.planner.predict.predict import predict
from zeroshard.train.config import TrainConfig
from zeroshard.train.other_models import other_model
from zeroshard.train.task import language_task, other_task

transformers = pytest.importorskip("transformers")
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 300}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 300,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 48,
        "pad_token_id": 1, "eos_token_id": 2}  # fmt: skip
IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "image_size": 32, "patch_size": 8}  # fmt: skip
SOUND = {
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 10,
    "decoder_start_token_id": 2,
    "bos_token_id": 2,
    "max_length": None,
}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
WAVES = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "classifier_proj_size": 8,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}  # fmt: skip
PYRAMID = {"image_size": 32, "depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2],
           "decoder_hidden_size": 16}  # fmt: skip
LLAMA = TEXT | {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64}
SIGHTED = {
    "text_config": LLAMA,
    "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
    "image_token_id": 5,
    "vision_feature_layer": -1,
}
SIGLIP = {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False}
TILES = [[32, 64], [64, 32]]
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int]] = {  # its labels' shape follows from the sequence
    "T5ForConditionalGeneration": ("T5Config", T5, ("input_ids", "labels"), 20),
    "BartForConditionalGeneration": ("BartConfig", BART, ("input_ids", "labels"), 20),
    "BertForMaskedLM": ("BertConfig", TEXT, ("input_ids", "labels"), 20),
    "BertForSequenceClassification": ("BertConfig", TEXT, ("input_ids", "labels"), 20),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", TEXT | {"num_labels": 1}, ("input_ids", "labels"), 20),
    "BertForTokenClassification": ("BertConfig", TEXT, ("input_ids", "labels"), 20),
    "BertForQuestionAnswering": ("BertConfig", TEXT, ("input_ids", "start_positions", "end_positions"), 20),
    "ViTForImageClassification": ("ViTConfig", IMAGE | {"num_channels": 1}, ("pixel_values", "labels"), 16),
    "SwinForImageClassification": ("SwinConfig", SWIN, ("pixel_values", "labels"), 1),
    "WhisperForConditionalGeneration": ("WhisperConfig", BART | SOUND, ("input_features", "labels"), 10),
    "ASTForAudioClassification": (
        "ASTConfig", IMAGE | {"num_mel_bins": 16, "max_length": 32}, ("input_values", "labels"), 20,
    ),
    "Wav2Vec2ForSequenceClassification": (
        "Wav2Vec2Config",
        TEXT | WAVES,
        ("input_values", "labels"), 20,
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", TEXT | WAVES, ("input_values", "labels"), 20),
    "SegformerForSemanticSegmentation": ("SegformerConfig", PYRAMID, ("pixel_values", "labels"), 1),
    "LlavaForConditionalGeneration": ("LlavaConfig", SIGHTED, ("input_ids", "pixel_values", "labels"), 20),
    "PaliGemmaForConditionalGeneration": (
        "PaliGemmaConfig",
        {"text_config": {**LLAMA, "model_type": "gemma", "head_dim": 8}, "image_token_id": 5,
         "projection_dim": 16, "vision_config": {
             **IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 16}},
        ("input_ids", "token_type_ids", "pixel_values", "labels"), 20,
    ),
    "SmolVLMForConditionalGeneration": (
        "SmolVLMConfig", {**SIGHTED, "vision_config": IMAGE, "scale_factor": 2},
        ("input_ids", "pixel_values", "labels"), 20,
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"text_config": {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
         "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 8,
                           "image_size": 32},
         "image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7},
        ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw", "labels"), 20,
    ),
    "LlavaNextForConditionalGeneration": (
        "LlavaNextConfig", SIGHTED | {"image_grid_pinpoints": TILES},
        ("input_ids", "pixel_values", "image_sizes", "labels"), 60,
    ),
    "DeepseekVLForConditionalGeneration": (
        "DeepseekVLConfig", SIGHTED | {"vision_config": SIGLIP}, ("input_ids", "pixel_values", "labels"), 20,
    ),
    "DeepseekVLHybridForConditionalGeneration": (
        "DeepseekVLHybridConfig",
        {"text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": 5, "high_res_vision_config": {
            "model_type": "sam_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 64, "patch_size": 8, "output_channels": 8, "window_size": 4, "global_attn_indexes": [1],
            "mlp_dim": 24}},
        ("input_ids", "pixel_values", "high_res_pixel_values", "labels"), 20,
    ),
    "IdeficsForVisionText2Text": (
        "IdeficsConfig",
        TEXT | {"max_position_embeddings": 64, "additional_vocab_size": 0, "cross_layer_interval": 1,
                "vision_config": {"embed_dim": 16, **IMAGE}},
        ("input_ids", "image_attention_mask", "pixel_values", "labels"), 20,
    ),
    "AriaForConditionalGeneration": (
        "AriaConfig",
        {"text_config": LLAMA | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2,
                                 "moe_num_shared_experts": 1, "pad_token_id": 0},
         "vision_config": {**IMAGE, "model_type": "idefics3_vision"}, "projector_patch_to_query_dict": {16: 4},
         "image_token_index": 5},
        ("input_ids", "pixel_values", "labels"), 20,
    ),
    "BlipForConditionalGeneration": (
        "BlipConfig",
        {"text_config": TEXT | {"encoder_hidden_size": 16, "max_position_embeddings": 64}, "vision_config": IMAGE,
         "projection_dim": 16, "image_text_hidden_size": 16},
        ("input_ids", "pixel_values", "labels"), 20,
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {"text_config": {**LLAMA, "model_type": "glm4v_text", "head_dim": 8,
                         "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
         "vision_config": {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 8, "image_size": 32,
                           "out_hidden_size": 16, "intermediate_size": 24},
         "image_token_id": 5, "image_start_token_id": 6, "image_end_token_id": 7, "video_start_token_id": 8,
         "video_end_token_id": 9, "video_token_id": 10},
        ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw", "labels"), 20,
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": TEXT | {"max_position_embeddings": 12}, "vision_config": IMAGE},
        ("input_ids", "pixel_values", "return_loss"), 12,
    ),
}  # fmt: skip
UNLIKE = (  # numbers of tokens
    *("Whisper", "AST", "Wav2Vec2", "CLIPModel", "Llava", "PaliGemma", "SmolVLM", "Qwen2VL", "LlavaNext", "DeepseekVL"),
    *("DeepseekVLHybrid", "Idefics", "Aria", "Blip", "Glm4v"),
)


def written(folder: Path, name: str, kind: str, settings: dict[str, Any]) -> Path:
    """The file of a configuration that names a class."""
    getattr(transformers, kind)(architectures=[name], **settings).save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_a_configuration_trains_its_class(tmp_path: Path, name: str) -> None:
    """A step with real values has a finite loss, and every parameter but unused ones gets a gradient."""
    kind, settings, keys, sequence = CASES[name]
    found = other_model(written(tmp_path, name, kind, settings), max(20, sequence))
    assert found is not None and found.name == name and found.sequence == sequence
    batch = found.batch(3)
    assert tuple(batch) == keys
    assert found.tokens == (1 if name.split("For")[0] in UNLIKE else sequence)
    whole = {key: value for key, value in batch.items() if not key.startswith("pixel") or "image_grid_thw" not in batch}
    assert all(len(value) == 3 for value in whole.values() if isinstance(value, torch.Tensor))
    torch.manual_seed(0)
    model = found.build()
    assert type(model).__name__ == name
    loss = model(**batch).loss
    assert torch.isfinite(loss)
    loss.backward()
    without = [path for path, each in model.named_parameters() if each.requires_grad and each.grad is None]
    assert len(without) < 4, without


@pytest.mark.parametrize(
    "name, kind, settings",
    [
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_head": 2, "n_layer": 2}),  # a causal language model
        ("BertModel", "BertConfig", TEXT),  # has no loss
        ("YolosForObjectDetection", "YolosConfig", {}),  # labels are boxes, as many as there are objects
        ("Wav2Vec2BertForSequenceClassification", "Wav2Vec2BertConfig", {}),  # a row's shape is in no known field
        ("MineForMaskedLM", "BertConfig", TEXT),  # no class of transformers
    ],
)
def test_other_classes_are_left_to_the_usual_way(tmp_path: Path, name: str, kind: str, settings: Any) -> None:
    file = written(tmp_path, name, kind, settings)
    assert other_model(file, 20) is None
    assert other_task(TrainConfig(model=str(file), tokenizer="bytes"), 4) is None


def test_rows_are_no_longer_than_tables_of_positions(tmp_path: Path) -> None:
    found = other_model(written(tmp_path, "BartForConditionalGeneration", "BartConfig", BART), 1024)
    assert found is not None and found.sequence == 48


@pytest.mark.parametrize(
    "name", by_default(["T5ForConditionalGeneration", "ViTForImageClassification"], "ViTForImageClassification")
)
def test_a_plan_is_printed_as_python_alone(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`zeroshard train` has no such model, so there is no command to copy; and the file of the plan is for zs.Plan."""
    kind, settings, _, sequence = CASES[name]
    written(tmp_path, name, kind, settings)
    words = ["--gpu", "A100-80", "--sequence", "20", "--json", "--out", str(tmp_path / "best.toml")]
    main(["plan", "--model", str(tmp_path), *words])
    answer = json.loads(capsys.readouterr().out)
    assert answer["plans"] and "zeroshard train" not in json.dumps(answer)
    plan = zs.Plan.from_dict(tomllib.loads((tmp_path / "best.toml").read_text()))
    assert plan.precision == "bf16"
    task = other_task(TrainConfig(model=str(tmp_path), tokenizer="bytes", sequence=20), 4)
    assert task is not None and task.name == f"{tmp_path}:{name}" and task.sequence == sequence


def test_the_whole_of_an_encoder_decoder_is_planned(tmp_path: Path) -> None:
    """transformers' causal language model of such a configuration is its decoder alone."""
    name = "BartForConditionalGeneration"
    file = written(tmp_path, name, "BartConfig", BART)
    config = TrainConfig(model=str(file), tokenizer="bytes", sequence=20)
    task = other_task(config, 4)
    assert task is not None
    whole = sum(
        p.numel() for p in transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)).parameters()
    )
    assert task.facts.parameters == whole
    with pytest.raises(ModelError, match=f"configures {name}, which is no causal language model"):
        language_task(config, 4)


def test_models_without_batches_are_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "YolosForObjectDetection", "YolosConfig", {})
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path), "--gpu", "A100-80"])
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "configures YolosForObjectDetection, which is no causal language model; make the model by code of your" in said
    )


def test_a_row_that_is_too_short_for_its_image_is_refused(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    with pytest.raises(ModelError, match=r"an image is 16 tokens of a Llava.* raise the sequence to more than 16"):
        other_model(written(tmp_path, name, *CASES[name][:2]), 16)


@pytest.mark.parametrize(
    "name, kind, settings, reason",
    [
        (
            "InstructBlipForConditionalGeneration",
            "InstructBlipConfig",
            {"vision_config": IMAGE, "image_token_index": 5, "num_query_tokens": 4},
            "missing 1 required positional argument: 'qformer_input_ids'",
        ),
        (  # logits of more tokens than its loss counts
            "IdeficsForVisionText2Text",
            "IdeficsConfig",
            CASES["IdeficsForVisionText2Text"][1] | {"additional_vocab_size": 2},
            "shape '[-1, 300]' is invalid for input of size 6040",
        ),
    ],
)
def test_a_class_without_a_loss_of_such_a_batch_is_refused_with_its_reason(
    tmp_path: Path, name: str, kind: str, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = rf"{name} makes no loss of the planner's batch, input_ids, .*: .*{re.escape(reason)}; give code of your own"
    with pytest.raises(ModelError, match=said):
        other_model(written(tmp_path, name, kind, settings), 20)
    assert "Traceback" not in caplog.text


def test_patches_of_all_images_are_cut_into_microbatches_as_in_a_run(tmp_path: Path) -> None:
    """Their first dimension is not that of the text."""
    name = "Qwen2VLForConditionalGeneration"
    file = written(tmp_path, name, *CASES[name][:2])
    task = other_task(TrainConfig(model=str(file), tokenizer="bytes", sequence=20), 8)
    assert task is not None
    optimizer, plan = partial(torch.optim.AdamW, lr=1e-3), zs.Plan(microbatches=2)
    task = replace(task, optimizer=optimizer, host_optimizer=None, whole_model=False)
    cut = replace(task, batch=lambda rows: zs.Microbatches([task.batch(rows // 2) for _ in range(2)]))
    assert predict(task, plan, ALONE, 8).peak_bytes == pytest.approx(run_peak(cut, plan, 8), rel=0.005)


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    assert other_model(tmp_path / "config.json", 20) is None
    with pytest.raises(ModelError, match="transformers cannot build"):
        language_task(TrainConfig(model=str(tmp_path), tokenizer="bytes"), 4)


MINE = """
import torch
import transformers


def model():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{settings}))


def batch(rows):
    return dict(pixel_values=torch.zeros(rows, 3, 32, 32), labels=torch.zeros(rows, dtype=torch.long))
"""


def test_code_of_the_user_may_make_modules_without_initialisers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors are made on the host; a row of its batches counts as one token, so no share of the peak is told."""
    monkeypatch.chdir(tmp_path)  # a line of the answer that begins with a long path is wrapped
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_vit.py").write_text(MINE.replace("{settings}", repr(IMAGE)))
    main(["plan", "--model", "own_vit.py", "--gpu", "A100-80"])
    said = capsys.readouterr().out
    assert "4 rows per step, each counted as a token" in said
    assert " rows/s." in said and "MFU" not in said and "zs.Plan(" in said


PEAKS = {
    **dict.fromkeys(("T5ForConditionalGeneration", "ViTForImageClassification", "BertForMaskedLM"), "bf16"),
    **dict.fromkeys(("LlavaForConditionalGeneration", "PaliGemmaForConditionalGeneration"), "bf16"),
    **dict.fromkeys(("SmolVLMForConditionalGeneration", "Qwen2VLForConditionalGeneration"), "bf16"),
    **dict.fromkeys(("LlavaNextForConditionalGeneration", "DeepseekVLForConditionalGeneration"), "bf16"),
    **dict.fromkeys(("DeepseekVLHybridForConditionalGeneration", "IdeficsForVisionText2Text"), "bf16"),
    **dict.fromkeys(("AriaForConditionalGeneration", "BlipForConditionalGeneration"), "bf16"),
    "Glm4vForConditionalGeneration": "bf16",
    **dict.fromkeys(("Wav2Vec2ForCTC", "SegformerForSemanticSegmentation"), "fp32"),  # norms of theirs need fp32
}


def drawn(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A model with drawn weights; transformers leaves those of normalised convolutions as the memory was."""
    model = build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize(
    "name",
    by_default(PEAKS, "Qwen2VLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration", "Wav2Vec2ForCTC"),
)
def test_peaks_are_those_of_runs(tmp_path: Path, name: str) -> None:
    """The planned peak of a step is that of a run, as torch's profiler counts it."""
    kind, settings, _, sequence = CASES[name]
    file = written(tmp_path, name, kind, settings)
    task = other_task(TrainConfig(model=str(file), tokenizer="bytes", sequence=max(20, sequence)), 8)
    assert task is not None
    optimizer, plan = partial(torch.optim.AdamW, lr=1e-3), zs.Plan.from_dict({"precision": PEAKS[name]})
    task = replace(task, optimizer=optimizer, host_optimizer=None, whole_model=False, build=partial(drawn, task.build))
    predicted = predict(task, plan, ALONE, 8)
    assert predicted.peak_bytes == pytest.approx(run_peak(task, plan, 8), rel=0.005)
