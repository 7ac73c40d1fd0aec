"""Families of transformers in pipelines of two and three stages, beside a plain loop: cut, refused, or different.

    python benchmarks/pipeline_families.py [--families NAME ...] [--all-schedules] [--json [FILE]]

Each tiny model is trained for three steps by SGD in two stages under 1F1B and in three under GPipe, and whole in one
process, on the same microbatches. Losses, the update of the first step and the weights after the last one
must be equal up to 1e-5 of the largest. Beside language models there are pairs of modalities and encoders of images.
The table has the blocks, the learned tensors that cross the boundaries, and for refusals the reason. The
exit status is 1 if anything differed or failed without a reason.

With `--all-schedules` 17 kinds of models with six blocks or more, or those named, are trained in two and in three
stages under each schedule that flushes. Models that draw are compared with one process under `rng="exact"`.
The UNets are those of diffusers, and are left out where it is not installed.

With `--json` figures and table are kept as FILE and beside it with the ending .md, by default
benchmarks/results/pipeline-families-DATE.json.
"""

import argparse
import copy
import importlib.util
import json
import os
import sys
import time
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import families  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from ranks import circumstances  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.utils import logging  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.schedule.orders import FLUSHING  # noqa: E402

STEPS, RATE, TOLERANCE = 3, 0.02, 1e-5
SHORT = ((2, "1f1b"), (3, "gpipe"))  # stages and schedules
LONG = tuple((stages, name) for stages in (2, 3) for name in FLUSHING if name != "pipedream-flush")  # 1F1B's other name
REFUSALS = (zs.PlanError, zs.ModelError, zs.BatchError)
Batch = dict[str, Tensor]

WORDS = {"vocab_size": 64, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
WORDS |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
WORDS |= {"pad_token_id": 0}
SIGHT: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
SIGHT |= {"image_size": 16, "patch_size": 8}
SOUND = {"vocab_size": 64, "d_model": 12, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2}
SOUND |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 8}
SOUND |= {"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1}
SOUND |= {"eos_token_id": 2, "decoder_start_token_id": 1}
ROUTED = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
IMAGE, BEFORE, AFTER = 60, 61, 62  # tokens that stand for an image, and around it


def text(rows: int, places: int = 0) -> Batch:
    """Tokens below 32, `places` of which stand for an image."""
    tokens = torch.randint(3, 32, (rows, 12))
    tokens[:, 2 : 2 + places] = IMAGE
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def images(rows: int) -> Tensor:
    """Random images of 16 by 16."""
    return torch.randn(rows, 3, 16, 16)


def pairs(rows: int) -> Batch:
    """Texts and images, with the contrastive loss."""
    return {"input_ids": text(rows)["input_ids"], "pixel_values": images(rows), "return_loss": True}  # type: ignore[dict-item]


def qwen(rows: int) -> Batch:
    """Texts with an image of one token, whose patches come in one list."""
    made = text(rows, 1)
    seen = {"pixel_values": torch.randn(rows * 4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}
    return {**made, **seen, "mm_token_type_ids": (made["input_ids"] == IMAGE).int()}


def gemma(rows: int) -> Batch:
    """Texts with an image of four tokens, and their kinds."""
    made = text(rows, 4)
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE).long(), "pixel_values": images(rows)}


def deep(name: str) -> nn.Module:
    """A language model with more layers than `families` gives it."""
    more = {**families.OF_FAMILIES.get(name, {}), **DEEP[name]}
    more.pop("hybrid_layer_ids", None)
    kinds = families.KINDS[::-1] if name == "bart" else families.KINDS  # with its encoder
    own = unittest.mock.patch.dict(families.OF_FAMILIES, {name: more})
    with own, unittest.mock.patch.object(families, "KINDS", kinds):
        return families.build(name)


def drawing(rate: float) -> nn.Module:
    """A vision transformer with stochastic depth, up to this rate."""
    config = hf.Dinov2Config(**{**SIGHT, "num_hidden_layers": 6, "mlp_ratio": 2}, drop_path_rate=rate)
    return hf.Dinov2ForImageClassification(config)


class Denoiser(nn.Module):
    """A UNet of diffusers that predicts noise at random times, with a text that conditions it or without."""

    def __init__(self, conditioned: bool) -> None:
        super().__init__()
        import diffusers

        sizes: dict[str, Any] = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1}
        sizes |= {"block_out_channels": (8, 8, 16), "norm_num_groups": 4, "attention_head_dim": 4}
        downs, ups = ("DownBlock2D", "AttnDownBlock2D"), ("UpBlock2D", "AttnUpBlock2D")
        if conditioned:
            downs, ups = ("DownBlock2D", "CrossAttnDownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
            sizes["cross_attention_dim"] = 12
        kind = diffusers.UNet2DConditionModel if conditioned else diffusers.UNet2DModel
        order = [downs[1], downs[1], downs[0]]
        self.unet = kind(down_block_types=order, up_block_types=[ups[0], ups[1], ups[1]], **sizes)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor, **text: Tensor) -> Any:
        """The mean squared error of the predicted noise, as `loss` of an answer like those of transformers."""
        found = self.unet(images + noise * times.view(-1, 1, 1, 1) / 100, times, **text).sample
        return hf.utils.ModelOutput(loss=nn.functional.mse_loss(found, noise))


def noisy(conditioned: bool, rows: int) -> Batch:
    """Images with noise, times, and the states of a text if it conditions."""
    made = {"images": images(rows), "noise": images(rows), "times": torch.randint(0, 100, (rows,))}
    return {**made, "encoder_hidden_states": torch.randn(rows, 5, 12)} if conditioned else made


def words(name: str, rows: int) -> Batch:
    """Tokens and labels; for encoder-decoders the decoder's tokens, and router losses."""
    tokens, made = torch.randint(3, families.VOCABULARY, (rows, 9)), dict[str, Any]()
    if name in ("t5", "switch_transformers", "bart"):
        made["decoder_input_ids"] = tokens.flip(1)
    if name == "switch_transformers":
        made["output_router_logits"] = True
    return {"input_ids": tokens, "labels": tokens, **made}


SIX = {"num_hidden_layers": 6}
DEEP: Mapping[str, Mapping[str, Any]] = {
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
    "switch_transformers": {"num_layers": 3, "num_decoder_layers": 3, "router_jitter_noise": 0.0},
    "bart": {"encoder_layers": 3, "decoder_layers": 3},
    **dict.fromkeys(("albert", "mamba2", "llama", "bert"), SIX),
    "gpt2": {"n_layer": 6},
    "zamba2": {
        "num_hidden_layers": 7,
        "layers_block_type": [*["linear_attention", "hybrid"] * 3, "linear_attention"],
    },
}
MORE: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "clip": (
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=WORDS, vision_config=SIGHT, projection_dim=6)),
        pairs,
    ),
    "siglip": (
        lambda: hf.SiglipModel(hf.SiglipConfig(text_config={**WORDS, "projection_size": 12}, vision_config=SIGHT)),
        pairs,
    ),
    "llava": (
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config=hf.LlamaConfig(**WORDS), vision_config=hf.CLIPVisionConfig(**SIGHT), image_token_id=IMAGE
            )
        ),
        lambda rows: {**text(rows, 4), "pixel_values": images(rows)},
    ),
    "qwen2_vl": (
        lambda: hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(
                text_config={**WORDS, "rope_parameters": SECTIONS},
                vision_config={
                    **{"depth": 3, "embed_dim": 16, "hidden_size": 12, "num_heads": 2, "patch_size": 4},
                    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2},
                },
                **{"image_token_id": IMAGE, "vision_start_token_id": BEFORE, "vision_end_token_id": AFTER},
                video_token_id=63,
            )
        ),
        qwen,
    ),
    "gemma3": (
        lambda: hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(
                text_config={**WORDS, "head_dim": 6, "sliding_window": 4},
                vision_config={**SIGHT, "vision_use_head": False},
                **{"mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": BEFORE, "eoi_token_id": AFTER},
            )
        ),
        gemma,
    ),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**SOUND, begin_suppress_tokens=None, suppress_tokens=None)
        ),
        lambda rows: {"input_features": torch.randn(rows, 8, 32), "labels": torch.randint(3, 64, (rows, 6))},
    ),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**{**SIGHT, "num_hidden_layers": 6})),
        lambda rows: {"pixel_values": images(rows), "labels": torch.randint(0, 2, (rows,))},
    ),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
                drop_path_rate=0.0,
            )
        ),
        lambda rows: {"pixel_values": images(rows), "labels": torch.randint(0, 2, (rows,))},
    ),
    "vit, stochastic depth": (
        partial(drawing, 0.4),
        lambda rows: {"pixel_values": images(rows), "labels": torch.randint(0, 2, (rows,))},
    ),
    **{f"{name}, deep": (partial(deep, name), partial(words, name)) for name in DEEP},
    **{
        f"unet, {kind}": (partial(Denoiser, kind == "text"), partial(noisy, kind == "text"))
        for kind in (("images", "text") if importlib.util.find_spec("diffusers") else ())
    },
    "mixtral, router losses": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**{**WORDS, "num_hidden_layers": 6}, **ROUTED)),
        text,
    ),
    "qwen3_moe, router losses": (
        lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**WORDS, **ROUTED, moe_intermediate_size=12, head_dim=6)
        ),
        text,
    ),
}  # fmt: skip
NAMED = (
    *(f"{name}, deep" for name in ("t5", "bart", "switch_transformers", "albert", "zamba2", "mamba2")),
    *("whisper", "clip", "siglip", "llava", "qwen2_vl", "gemma3", "mixtral, router losses", "vit"),
    *("vit, stochastic depth", *(name for name in MORE if name.startswith("unet"))),
)
RANDOM = ("vit, stochastic depth",)


def build(name: str) -> nn.Module:
    """A tiny model without dropout."""
    if name not in MORE:
        return families.build(name)
    torch.manual_seed(0)
    return MORE[name][0]().train()


def batch(name: str, model: nn.Module, step: int) -> Batch:
    """The microbatch of a number."""
    torch.manual_seed(1000 + step)
    return MORE[name][1](2) if name in MORE else {k: v[:1] for k, v in families.batch(model, step).items()}


def trained(mesh: zs.Mesh, name: str, schedule: str) -> dict[str, Any]:
    """The result of one family, on one of the ranks."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    model = build(name)
    plain = copy.deepcopy(model)
    row: dict[str, Any] = {"class": type(model).__name__}
    try:
        chunks = 2 if schedule == "interleaved" else 1
        cut = zs.Pipeline(mesh.ranks, schedule=schedule, virtual_stages=chunks, balance="parameters")  # type: ignore[arg-type]
        numbers: Any = "exact" if name in RANDOM else "fast"
        plan = zs.Plan(pipeline_parallel=cut, microbatches=mesh.ranks, rng=numbers)
        make = partial(torch.optim.SGD, lr=RATE)
        engine = zs.Engine(model, make, plan, mesh=mesh, example=batch(name, plain, 0))
        chain = engine._stage.chain
        firsts = engine._stage.firsts[1:-1]
        row |= {"blocks": chain.blocks, "carried": [max(1, len(chain.carried.at(first))) for first in firsts]}
        row |= compared(engine, plain, name, mesh.ranks)
    except REFUSALS as error:
        return row | {"verdict": "refused", "why": str(error)}
    except Exception as error:
        return row | {"verdict": "failed", "why": f"{type(error).__name__}: {error}"}
    worst = max(row["losses"], row["gradients"], row["weights"])
    return row | {"verdict": "equal" if worst <= TOLERANCE else "differs"}


def compared(engine: Any, plain: Any, name: str, microbatches: int) -> dict[str, Any]:
    """How far losses, the first update and weights are from those of a plain loop, relative to the largest."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    alone = None
    if name in RANDOM:
        make = partial(torch.optim.SGD, lr=RATE)
        alone = zs.Engine(plain, make, zs.Plan(microbatches=microbatches, rng="exact"), mesh=zs.Mesh())
    far: dict[str, Any] = {"losses": 0.0}
    for step in range(STEPS):
        parts = [batch(name, plain, microbatches * step + n) for n in range(microbatches)]
        before = families.weights_of(plain)
        expected = 0.0
        if alone is not None:
            expected = float(alone.train_step(zs.Microbatches(parts)).loss)
        for part in parts if alone is None else ():
            loss = plain(**part).loss / microbatches
            loss.backward()
            expected += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        found = engine.train_step(zs.Microbatches(parts)).loss
        far["losses"] = max(far["losses"], families.distance(expected - float(found)) / max(1.0, abs(expected)))
        if step in (0, STEPS - 1):
            worst, error, moved, largest = families.furthest(engine.state_dict(), plain, before)
            if not moved:
                raise ValueError("no weight of the plain loop moved in this step")
            kind, scale = ("gradients", max(RATE, moved)) if step == 0 else ("weights", max(1.0, largest))
            far |= {kind: error / scale, f"worst of {kind}": worst}
    return far


def run(names: Sequence[str], runs: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Train, and print a line for each family, number of stages and schedule."""
    from pool import Pool, WorkerError

    began, rows = time.monotonic(), dict[str, Any]()
    sizes = tuple(sorted({stages for stages, _ in runs}))
    pool = Pool(max(sizes), sizes)
    target = importlib.import_module(Path(__file__).stem).trained  # the workers import it by this name
    for name in names:
        for stages, schedule in runs:
            needed = stages * (2 if schedule == "interleaved" else 1)
            known = [row["blocks"] for row in rows.get(name, {}).values() if "blocks" in row]
            if known and known[0] < needed:
                continue
            try:
                answers = pool.run(target, stages, name, schedule)
                bad = [each for each in answers if each["verdict"] != "equal"]
                row = next((each for each in bad if not each.get("why", "").startswith("CommError")), answers[0])
            except (WorkerError, AssertionError) as error:
                pool.stop()
                row = {"verdict": "failed", "why": str(error).strip().splitlines()[-1]}
            cell = f"{stages} stages, {schedule}"
            rows.setdefault(name, {})[cell] = row
            figures = ", ".join(f"{each} {row[each]:.0e}" for each in ("losses", "gradients", "weights") if each in row)
            carried = f"{row['blocks']} blocks, carried {row['carried']}" if "blocks" in row else ""
            print(f"{name:<28} {cell:<21}  {row['verdict']:<8} {carried:<28} {figures}", flush=True)
            if "why" in row:
                print(f"    {row['why']}", flush=True)
    pool.stop()
    cells = [f"{stages} stages, {schedule}" for stages, schedule in runs]
    counts = {cell: dict(Counter(each[cell]["verdict"] for each in rows.values() if cell in each)) for cell in cells}
    for cell, found in counts.items():
        print(f"{cell}: " + ", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    return {"families": rows, "counts": counts, "seconds": round(time.monotonic() - began)}


def markdown(kept: Mapping[str, Any]) -> str:
    """The table as it is kept."""
    lines = [
        f"{kept['cpu']}, {kept['cores']} cores, {kept['date']}; {kept['seconds']} s; torch {kept['torch']}, "
        f"transformers {kept['transformers']}; {STEPS} steps, as many microbatches as stages.",
        "",
        *(f"- {cell}: {', '.join(f'{v} {k}' for k, v in found.items())}" for cell, found in kept["counts"].items()),
        "",
        "| Family | Stages | Verdict | Blocks | Tensors at the boundaries | Losses | Gradients | Weights | Why |",
        "|---|---|---|---:|---|---:|---:|---:|---|",
    ]
    for name, cells in kept["families"].items():
        for cell, row in cells.items():
            figures = (f"{row[each]:.0e}" if each in row else "–" for each in ("losses", "gradients", "weights"))
            carried = ", ".join(map(str, row.get("carried", []))) or "–"
            why = row.get("why", "").replace("|", "/").replace("\n", " ")
            lines.append(
                f"| {name} | {cell.replace(' stages', '')} | {row['verdict']} | {row.get('blocks', '–')} | {carried} | "
                f"{' | '.join(figures)} | {why} |"
            )
    lines += ["", "Left out:", ""]
    lines += [f"- {name}: {why}" for name, why in families.LEFT_OUT.items() if name not in MORE]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--all-schedules", action="store_true", help="two and three stages, by default of 18 families")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="keep figures and table")
    options = parser.parse_args()
    every = options.all_schedules
    kept = run(options.families or (NAMED if every else [*families.names(), *MORE]), LONG if every else SHORT)
    if options.json is not None:
        today = datetime.now(UTC).date().isoformat()
        kept |= circumstances() | {"date": today, "torch": torch.__version__, "transformers": hf.__version__}
        kind = "pipeline-schedules" if every else "pipeline-families"
        path = Path(options.json) if options.json else RESULTS / f"{kind}-{today}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(kept))
    return int(any(found.keys() & {"differs", "failed"} for found in kept["counts"].values()))


if __name__ == "__main__":
    sys.exit(main())
