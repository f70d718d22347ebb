"""`rsrv-bundle export --hf DIR`: export a directory of Hugging Face, and compare the bundle with the directory's framework."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from rsrv.command import put
from rsrv.hooks import BadInput
from rsrv.hooks.loader import load_hooks
from rsrv_bundle import writer
from rsrv_bundle.errors import BundleError, PaddingError, summary
from rsrv_bundle.from_torch import export_torch
from rsrv_bundle.hf import audio, image, text
from rsrv_bundle.hf.adapter import merged
from rsrv_bundle.hf.directory import Directory, open_directory
from rsrv_bundle.hf.generate import export_decoder
from rsrv_bundle.hf.loading import offline
from rsrv_bundle.hf.proof import prove
from rsrv_bundle.hf.recipe import HubOptions, HubRecipe
from rsrv_bundle.hf.samples import read_samples
from rsrv_bundle.numerics import TOLERANCE
from rsrv_bundle.reader import read_bundle
from rsrv_bundle.spec import Bundle

Make = Callable[[Directory, HubOptions], HubRecipe]
#: Task -> its recipe, for a directory that does not come from sentence-transformers.
TASKS: Final[Mapping[str, Make]] = {
    "feature-extraction": text.embed,
    "text-ranking": text.rank,
    "text-classification": text.classify,
    "token-classification": text.tag,
    "fill-mask": text.fill,
    "image-classification": image.classify,
    "object-detection": image.detect,
    "image-segmentation": image.segment,
    "depth-estimation": image.depth,
    "automatic-speech-recognition": audio.speech,
    "audio-classification": audio.classify,
}
#: The task of decoders, which has no recipe.
GENERATION: Final = "text-generation"
#: End of an architecture's name -> its task.
_HEADS: Final[Mapping[str, str]] = {
    "ForCausalLM": GENERATION,
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForCTC": "automatic-speech-recognition",
    "ForAudioClassification": "audio-classification",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForInstanceSegmentation": "image-segmentation",
    "ForUniversalSegmentation": "image-segmentation",
    "ForSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "Model": "feature-extraction",
}
_BATCH_SIZES = (1, 8)


def export_hf(
    directory: str | os.PathLike[str],
    *,
    out_dir: str | os.PathLike[str],
    options: HubOptions = HubOptions(),  # noqa: B008 - HubOptions is frozen
    description: str = "",
    platform: str = "cpu",
    tolerance: Mapping[str, float] | None = None,
    weights: str | None = None,
    overwrite: bool = False,
) -> Bundle:
    """Write the model in a directory as a bundle, and return the bundle as read back.

    The bundle's answers are compared with the answers of the framework that the directory is for.

    directory: a directory that `save_pretrained` or sentence-transformers wrote. It is checked first, and nothing in it is executed.
    tolerance, weights: as for `export_bundle`. The entry f32 of `tolerance` also limits the difference of whole answers.

    Raises BundleError if the directory breaks a rule, if its model cannot be exported, or if the answers differ. Also raises
    FileExistsError and OSError.
    """
    target = writer.free_target(out_dir, overwrite)
    checked = open_directory(Path(directory))
    limit = {**TOLERANCE, **(tolerance or {})}["f32"]
    with offline(), writer.scratch_beside(target) as scratch:
        if options.adapter is not None:
            # The folder of the merged model begins with a dot. No bundle's name does, so the two cannot be the same.
            checked = merged(checked, options.adapter, Path(scratch, ".merged", checked.path.name))
        task = options.task or task_of(checked)
        others = {
            "description": description or f"{checked.architecture or 'A model'}: {task}.",
            "platform": platform,
            "tolerance": tolerance or {},
            "weights": weights,
        }
        work = Path(scratch, target.name)
        if task == GENERATION:
            errors = export_decoder(checked, options, work, limit=limit, **others)
        else:
            recipe = recipe_of(checked, task, options)
            if recipe.note:
                put(f"{target.name}: {recipe.note}", sys.stderr)
            recipe = replace(recipe, samples={**recipe.samples, **read_samples(options.samples, recipe)})
            errors = _export_recipe(recipe, options, work, limit, others)
        writer.store_numerics(work / "manifest.yaml", {"answers": errors})
        writer.put_in_place(work, target, Path(scratch, ".replaced"))
    return read_bundle(target)


def _export_recipe(
    recipe: HubRecipe, options: HubOptions, work: Path, limit: float, others: Mapping[str, Any]
) -> dict[str, float]:
    """Write the bundle of a recipe, and return the largest error of each output. Raises BundleError."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        if recipe.tokenizer is not None:
            files = [Path(folder, "tokenizer.json")]
            files[0].write_text(recipe.tokenizer, encoding="utf-8")

        def write(hooks: str, pad: str) -> Bundle:
            return export_torch(
                recipe.module,
                _examples(recipe, hooks, Path(folder)),
                batch_sizes=options.batch_sizes or _BATCH_SIZES,
                out_dir=work,
                axes=recipe.axes,
                input_shapes=recipe.input_shapes,
                pad=pad,
                hooks=hooks,
                files=files,
                client_inputs=recipe.client_inputs,
                client_outputs=recipe.client_outputs,
                task=recipe.task,
                **{**others, "tolerance": {**recipe.tolerance, **others["tolerance"]}},
            )

        try:
            bundle = write(recipe.hooks, recipe.pad)
        except PaddingError as e:
            put(
                f"{work.name}: gets no padded axis, so requests of different lengths share no execution: {e.problems[0]}",
                sys.stderr,
            )
            bundle = write(recipe.unpadded_hooks, "")
    return prove(bundle, recipe, limit)


def _examples(recipe: HubRecipe, hooks: str, folder: Path) -> Mapping[str, Any]:
    """Return the executable inputs that `hooks` makes from the first two samples. `folder` has the files that the hooks read."""
    (folder / "model.py").write_text(hooks, encoding="utf-8")
    first = list(recipe.samples.values())[:2]
    request = {name: np.concatenate([sample[name] for sample in first]) for name in recipe.inputs}
    try:
        preprocess = load_hooks(folder / "model.py").preprocess
        assert preprocess is not None
        return preprocess(request)
    except (BadInput, ValueError) as e:
        raise BundleError(f"the hooks fail with the first samples: {e}") from e


def recipe_of(directory: Directory, task: str, options: HubOptions) -> HubRecipe:
    """Return the recipe of a directory for a task. Raises BundleError if there is none."""
    if task not in TASKS:
        raise BundleError(f"--task: '{task}' is none of {', '.join((*TASKS, GENERATION))}")
    for name, given in (("--context", options.context), ("--slots", options.slots)):
        if given is not None:
            raise BundleError(f"{name}: belongs to {GENERATION}; leave it out")
    make = TASKS[task]
    if task == "feature-extraction" and "Pooling" in directory.modules:
        make = text.sentences
    elif task == "feature-extraction" and directory.has("preprocessor_config.json"):
        make = image.embed
    try:
        return make(directory, options)
    except (BundleError, OSError, MemoryError):
        raise
    except Exception as e:
        # The files may have wrong values that no check rejects, for example the number of a filter that does not exist.
        raise BundleError(f"{directory.path.name}: cannot be read as a model for {task}: {summary(e)}") from e


def task_of(directory: Directory) -> str:
    """Return the task that config.json and modules.json name. Raises BundleError if they name none."""
    if "Pooling" in directory.modules:
        return "feature-extraction"
    name = directory.architecture
    head = next((head for head in _HEADS if name.endswith(head)), "")
    if not head:
        raise BundleError(
            f"config.json: architectures: '{name:.100}' has no known task; give --task, one of {', '.join((*TASKS, GENERATION))}"
        )
    if head == "ForSequenceClassification" and "feature_extractor_type" in directory.json(
        "preprocessor_config.json"
    ):
        # wav2vec2 and its relatives classify a sound, although the name says "sequence".
        return "audio-classification"
    labels = directory.config.get("id2label")
    if head == "ForSequenceClassification" and isinstance(labels, dict) and len(labels) == 1:
        return "text-ranking"
    return _HEADS[head]
