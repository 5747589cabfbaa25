"""The columns of CSV files: one name for one thing in every table, and how a statistic is appended to it.

A column is the name of a key, of a quantity, or of a quantity with one of `STATISTICS`: psnr_mean, psnr_low, psnr_high.
A mean with an interval always has all three. What a paper gives for a quantity is called paper_QUANTITY, and a paired
difference of two lines QUANTITY_difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedmjp.metrics import METRIC_DIRECTIONS

# Columns of hexadecimal digits, which pandas takes for numbers where no letter is among them (or only an e).
TEXT = {"run_id": str, "commit": str}
# What a line is of.
KEYS = {
    "run_id": "digest of the options of a run",
    "dataset": "the images: name of the data set or where they are from",
    "model": "its name",
    "weights": "where its weights are from; NOT TRAINED where they are random",
    "start": "where the weights of a training started",
    "block": "first block: standard, or april (no norm, no residual)",
    "line": "model or variant as the printed table calls it",
    "network": "of MST: student, teacher, or start, which is the student before training; of MP3 start or trained",
    "measure": "how features are judged: knn_K, by K nearest neighbours, or linear, by a linear probe; in "
    "results/mp3 neighbours (20, %), distance that a head attends to (shares of the side), or a correlation",
    "after": "what was trained last: the encoder without labels, or the model with labels",
    "layer": "number of the block, from 1",
    "head": "number of the attention head, from 1",
    "eta": "masking ratio of MP3's training",
    "eta_test": "masking ratio at which places are predicted",
    "place": "table or figure of the paper",
    "claim": "what the paper says, in words",
    "expected": "sign of the difference according to the paper",
    "unit": "of the difference",
    "defense": "the clients' defence",
    "defense_parameters": "its options, as JSON",
    "gamma": "masking ratio of MJP; 0 for none",
    "gamma_pos": "of DropPos: share of the seen patches without position; its gamma is the share that is not seen",
    "mask_choice": "which patches MJP masks: block, random, attention, attended or fixed",
    "training_gamma": "masking ratio of the training, where that at inference is gamma",
    "positions": "position embeddings of jigsawed patches: own or unknown",
    "solver": "what places pieces: border, learned or both",
    "restarts": "arrangements that a search tries at most",
    "level": "PSNR of pieces with every one in its place (dB); 120 for exact",
    "image_size": "pixels of a side",
    "pieces": "that an image is cut into",
    "dal": "kind of MJP's localisation term",
    "objective": "what is trained, as --objective takes it",
    "partition": "how the data are distributed over clients",
    "point": "defence with its strength, in words",
    "setting": "who is attacked and what is compared, as the table's page defines it",
    "update": "what a client sends: gradient or weights",
    "updates": "number of a client's updates that the attack had",
    "round": "round of the federation, from 1; 0 before training",
    "rounds": "rounds of the federation",
    "epoch": "of a training, from 1",
    "epochs": "of a training",
    "pretraining_epochs": "of the training without labels before it",
    "clients": "in a round",
    "client": "its number, from 0",
    "image": "its place in the client's batch, from 0",
    "batch_size": "images of an update",
    "steps": "of a search, or of a training's epoch",
    "attack": "its name",
    "augmentation": "what clients do to an image before they feed it",
    "against": "what an answer is compared with, or the line that a difference is taken from",
    "recipe": "how clients train, where one thing differs from one image a step whose gradient is sent",
    "withheld": "the group of parameters that the update lacks",
    "answer": "the verdict",
    "init": "where a search started",
    "settings": "the attack's settings that differ between the lines",
    "highest": "whether no other settings of the attack reach a higher mean PSNR",
    "strongest": "whether the attack is the strongest on this federation",
    "most_patches": "the attack that brings most patches above 25 dB, over the guesses' own",
    "any_place": "whether those patches are counted wherever they lie, because their order is not in the update",
    "threat_model": "what the server was granted",
    "precision": "type of weights and gradients",
    "message": "precision in which an update is sent, or what the client adds to it",
    "metric": "the quantity of value_mean and difference_mean",
    "statistic": "of a model that a client was sent, by name",
    "strength": "of a server's change to the model, in (0, 1]",
    "corruption": "its name",
    "corruptions": "the corruptions that are averaged",
    "dimension": "number of principal components",
    "patches": "of an image",
    "channels": "of a token",
    "classes": "of the classifier",
    "labels": "granted to the server, or inferred by it",
    "driver": "LAPACK's driver of a linear solve",
    "way": "how the same search is computed",
    "executor": "where the tasks of a campaign were computed, as the options that ask for it",
    "repeat": "number of the timed repetition, from 0",
    "method": "a variant of MJP in the paper's words",
    "measured": "of scale: a round or a report",
    "source": "measured, or the paper's table",
    "seed": "fixes all random numbers",
    "device": "where it was computed",
    "commit": "of the code",
    "version": "of fedmjp",
    "torch_version": "of torch",
    "diagnosis": "the most common reason why an attack failed",
    "flags": "what makes the figures doubtful",
    "verdict": "what the difference says of the paper's, in words; all of a table are tested together",
    "psnr_by_round": "mean PSNR (dB) at each attacked round, as ROUND=dB",
    "note": "why there is no image, or why not to trust it",
}
# How many; a mean without another count is over `count` images.
COUNTS = {
    "in_time": "images that took at most five seconds",
    "count": "images behind a mean",
    "failed": "of count, images of which the attack returned nothing",
    "recovered": "images above 25 dB, nearer than the best guess",
    "above_25": "images above 25 dB",
    "above_30": "images above 30 dB",
    "whole": "images that the attack vouches for, every pixel",
    "certified": "images whose reconstruction reproduces the update",
    "certified_right": "of them, images with every patch above 25 dB",
    "claims": "images whose answer comes without a diagnosis",
    "closed_form": "images of which a closed form and a search give the same",
    "candidates": "images among which the original of a reconstruction is looked for, itself among them",
    "seeds": "trainings, federations, or seeds of weights and masks behind a mean",
    "repeats": "timed repetitions",
    "log_rows": "rows that a report is of",
    "checks": "models that clients have checked",
    "alarms": "of them, models that a statistic finds suspicious",
    "test_images": "images behind an accuracy",
    "images_seen": "by a training",
    "images": "of a client",
    "batches": "that were attacked",
    "solved": "of them, batches of which the feature of every image was found",
    "repeated": "images whose label another one of their batch has before them",
    "sent": "numbers of a message",
    "values": "numbers of an image",
    "pairs": "of updates that were compared",
    "shared": "pairs of updates that do share an image",
    "kept": "of them, pairs that an attack took for one image",
    "corruption_count": "corruptions that are averaged",
}
QUANTITIES = {
    "joined": "updates whose equations an attack added up; of pairs, those that it took for one image",
    **{name: f"{direction.label}, of reconstructions" for name, direction in METRIC_DIRECTIONS.items()},
    "psnr_visible": "PSNR over the patches whose position is not hidden (dB)",
    "psnr_visible_exact": "PSNR over all patches if those whose position is not hidden were exact (dB)",
    "psnr_unordered": "PSNR with the patches of hidden positions assigned to the original's in the best way (dB)",
    "psnr_unbiased": "PSNR of the least error of an unbiased estimate from noisy equations (dB)",
    "psnr_normal": "the same of any estimate, where pixels are normal with the image's variance (dB)",
    "placed": "share of images above 20 dB with every patch where the attack placed it",
    "neighbours": "share of the pairs of places side by side, one of them scrambled at least, that hold neighbours",
    "in_place": "share of the scrambled pieces that are put in their places",
    "hidden": "positions whose patches an update hides",
    "gain": "PSNR over the best guess without a gradient, on the same image (dB)",
    "known": "share of pixels that the attack vouches for",
    "identifiable": "combinations of an image's pixels that a message determines to 25 dB, to first order",
    "feature_error": "largest of a batch, in lengths of a feature",
    "searches": "from different starts, until one succeeded",
    "label_accuracy": "share of labels inferred correctly",
    "condition": "condition number of the system that the attack solved",
    "residual": "relative distance of the reconstruction's gradient from the received one",
    "vouched": "share of patches that the attack vouches for",
    "psnr_whole": "PSNR of the worst of the images that the attack vouches for (dB)",
    "right": "share of patches above 25 dB",
    "patches_any_order": "share of patches above 25 dB in any place, of attacks that guess their order",
    "patches_found": "share of patches that most_patches brings above 25 dB",
    "recognised": "share of attacked images that came back within an LPIPS of 0.1",
    "reidentified": "share of attacked images whose original is the nearest of the candidates to the reconstruction",
    "claims_right": "share of the patches vouched for that are above 25 dB, over all images",
    "excess": "vouched minus right, on the same image",
    "seconds": "of an attack, a round or a step",
    "accuracy": "top-1 accuracy: per cent; a share (0 to 1) in rounds.csv and federated_tradeoff",
    "loss": "on test images",
    "train_loss": "on training images",
    "test_loss": "on test images",
    "test_accuracy": "top-1 accuracy on test images, a share (0 to 1)",
    "train_seconds": "of an epoch",
    "images_per_second": "of an epoch, or of a training step",
    "rate": "learning rate at the end of an epoch",
    "places": "per cent of patches whose place is predicted",
    "printed_places": "the average that a paper prints, where it is not that of its cells",
    "consistency": "per cent of images whose class a jigsaw does not change",
    "diff_norm": "squared distance of an image's features before and after a jigsaw",
    "diff_norm_root": "the same, not squared",
    "diff_share": "diff_norm as a share of that between two images",
    "value": "of the column metric",
    "difference": "of the line from another one, paired",
    "with_positions": "value with position embeddings",
    "without": "value without them",
    "difference_p": "Student's two-sided p of a difference of 0 over seeds, before the correction for several",
    "difference_margin": "half the interval of the difference over the test images of one training each",
    "one_seed_margin": "half the interval over the test images of one training",
    "miou": "mean over classes of intersection over union (%)",
    "macc": "mean over classes of the share of pixels found (%)",
    "place_accuracy": "per cent of places predicted correctly at the end of the pre-training",
    "explained": "variance of a word's frames around their mean over time that the reconstruction explains (%)",
    "rank": "frames, or combinations of them, that the attack solved for; median; in ranks.csv the original's place "
    "among the candidates, 1 the nearest to the reconstruction",
    "error": "top-1 error (%)",
    "ce": "corruption error relative to the reference (%)",
    "mce": "mean of ce over corruptions (%)",
    "rise": "error above that on untouched images (points)",
    "imagenet_a_accuracy": "top-1 accuracy on ImageNet-A (%)",
    "imagenet_a_aurra": "area under the response rate accuracy curve (%)",
    "imagenet_o_aupr": "area under precision and recall (%)",
    "entropy": "of a head's [CLS] map, as a share of a uniform map's",
    "distance": "attended, in shares of the image's side",
    "head_diversity": "divergence of the heads' maps, as a share of its largest value",
    "content": "divergence of an image's map from the mean map (bits)",
    "explained_variance": "share in the first components (%)",
    **{
        f"{name}_{space}": f"error of {words} of a patch's place, {space} (patches)"
        for name, words in (("mae", "regression"), ("ridge", "ridge regression"), ("guess", "guessing"))
        for space in ("1d", "2d")
    },
    "calibration": "a statistic's value in the rounds that calibrate its threshold",
    "evaluation": "a statistic's value in other honest rounds",
    "threshold": "of a statistic, above which a client is warned",
    "score": "largest statistic of a model in units of its threshold",
    "score_rest": "the same without the statistics that a server can get around",
    "flagged": "share of models that a statistic finds suspicious",
    "flagged_rest": "share that score_rest finds suspicious",
    "auc": "area under the ROC curve of the score against honest models",
    "auc_rest": "the same of score_rest",
    **{
        f"auc_{name}": f"the same of the statistic {name}"
        for name in (
            *("row_norms", "row_spread", "dead_rows", "bins", "distance", "bias_range", "concentration"),
            "silent_images",
        )
    },
    "relative_error": "of a linear solve",
    "ratio": "of seconds to those of the plain variant",
    "step_ratio": "seconds of a step with MJP to those without",
    "input_share": "seconds of masks and jigsaw to those of a plain step",
    "looped_over_vectorised": "seconds of masks and jigsaw in loops to those of ours",
    "speedup": "seconds of the same campaign in one process to those of this run",
    "core_seconds": "CPU time of the parent and an even share of that of its workers",
    "core_speedup": "core_seconds of the same campaign in one process to those of this run",
    "load": "one-minute load average of the machine before a run",
    "times_faster": "seconds of the breaching package's step to those of this one",
    "ours_over_bare": "seconds of our path to those of a bare forward and backward pass",
    "peer_over_ours": "seconds of the breaching package to those of our path",
    "step_over_bare": "seconds of our training step to those of a bare timm step with attention as ours",
    "step_over_fused": "seconds of our training step to those of a bare timm step with torch's fused attention",
    "loaded_step_over_bare": "step_over_bare with the time of drawing the batch in both",
    "loaded_step_over_fused": "step_over_fused with the time of drawing the batch in both",
    "bare_images_per_second": "of a bare timm step with attention as ours",
    "loaded_images_per_second": "of our training step with the time of drawing the batch",
    **{
        f"{name}_seconds": f"of {words}"
        for name, words in (
            ("plain_step", "a training step"),
            ("mjp_step", "a training step with MJP"),
            ("federated", "a round with Flower"),
            ("plain", "a round without it"),
            ("load", "drawing a training batch"),
            ("ours", "our training step"),
            ("bare", "a bare timm step with attention as ours"),
            ("fused", "a bare timm step with torch's fused attention"),
        )
    },
    **{
        f"{name}_ms": f"milliseconds an image, {words}"
        for name, words in (
            ("bare", "bare pass"),
            ("ours", "our path"),
            ("gradients", "its gradients"),
            ("scores", "its scores"),
            ("peer", "breaching package"),
            ("image", "linear solve"),
            ("step", "step of a search"),
        )
    },
    "cpu_seconds": "processor time, of a round, a report or a campaign (all its processes)",
    "peak_mib": "memory above model and images (MiB)",
    "process_mib": "most memory of a process, libraries among it (MiB)",
    "disk_mib": "of a log of rows (MiB)",
    "page_mib": "of report.html (MiB)",
    **{
        f"{name}_peak_mib": f"memory above model and images (MiB), {words}"
        for name, words in (("bare", "bare pass"), ("ours", "our path"), ("peer", "breaching package"))
    },
}
STATISTICS = {
    "mean": "mean",
    "low": "lower end of its 95 % interval",
    "high": "upper end of its 95 % interval",
    "median": "median",
    "first_decile": "a tenth of the images are below it",
    "share_recognisable": "share of images above 25 dB",
    "min": "least of the repetitions or images",
    "max": "largest of the repetitions or images",
    "q25": "lower quartile of the repetitions",
    "q75": "upper quartile of the repetitions",
    "spread": "standard deviation over repetitions",
    **{f"severity_{n}": f"at severity {n}" for n in range(1, 6)},
}
TOGETHER = (
    ("mean", "low", "high"),
    ("median", "low", "high"),
    ("median", "min", "max"),
    ("median", "q25", "q75"),
    ("mean", "spread"),
)

_STATISTIC = re.compile("(.+)_(" + "|".join(STATISTICS) + ")")


def split_column(column: str) -> tuple[str, str]:
    """A column's quantity and statistic; the statistic is "" for a single value, a key or a count.

    Raises:
        ValueError: a name that is none of `KEYS`, `COUNTS` and `QUANTITIES`, alone or with a statistic.
    """
    if column in KEYS or column in COUNTS:
        return column, ""
    found = _STATISTIC.fullmatch(column)
    whole, statistic = found.groups() if found and column not in QUANTITIES else (column, "")
    name = whole.removeprefix("paper_").removesuffix("_difference") or whole
    if whole not in QUANTITIES and name not in QUANTITIES:
        raise ValueError(f"no table has a column {column!r}; name it in fedmjp/report/columns.py")
    return whole, statistic


def check_columns(columns: Iterable[str]) -> None:
    """Check the header of a table.

    Raises:
        ValueError: an unknown name, a name given twice, or an interval without its mean.
    """
    columns = list(columns)
    if len(set(columns)) < len(columns):
        raise ValueError(f"two columns of one name: {', '.join(columns)}")
    parts: dict[str, set[str]] = {}
    for column in columns:
        name, statistic = split_column(column)
        parts.setdefault(name, set()).add(statistic)
    for name, found in parts.items():
        for bound in found & {"low", "high", "q25", "q75", "min", "spread"}:
            if not any(bound in group and found >= set(group) for group in TOGETHER):
                raise ValueError(f"{name}_{bound} stands without {' and '.join(_partners(name, bound))}")


def _partners(name: str, bound: str) -> list[str]:
    return [f"{name}_{part}" for part in next(group for group in TOGETHER if bound in group) if part != bound]
