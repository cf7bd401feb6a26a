"""The chat template that a model brings, where its files lie on this machine, and ours where that one is not stable."""

import os
from dataclasses import dataclass
from pathlib import Path

from proxy.chat_template import TemplateFailed, read_special_tokens, read_template
from proxy.core.template_check import checked, stable
from proxy.template_verdicts import check_file, fitting_file

_OF_TOKENIZER, _OF_ITS_OWN = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which of our templates to serve with (None: the model's own), and why, in a sentence."""

    path: Path | None
    says: str


def folder_of(model: str) -> Path | None:
    """Return the folder with a model's files: the one that is named, or that of its download; None without one."""
    named = Path(model).expanduser()
    if named.is_dir():
        return named
    downloads = _downloads() / f"models--{model.replace('/', '--')}"
    try:
        revision = (downloads / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = downloads / "snapshots" / revision
    return found if found.is_dir() else None


def _downloads() -> Path:
    """Return where downloads are kept, as huggingface_hub has it."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def choose(folder: Path) -> Chosen:
    """Say by which template the model in `folder` is to be served."""
    try:
        settings = folder / _OF_TOKENIZER
        own = folder / _OF_ITS_OWN
        text, tokens = read_template(own if own.is_file() else settings)
        if not tokens and settings.is_file():
            tokens = read_special_tokens(settings)
        verdicts = check_file(text, tokens).verdicts
        if not checked(verdicts):
            return Chosen(None, "The model's own chat template could not be checked.")
        if stable(verdicts):
            return Chosen(None, "The model's own chat template is stable.")
        causes = ", ".join(
            dict.fromkeys(str(each.cause) for each in verdicts if each.outcome == "unstable" and each.counted)
        )
        if (ours := fitting_file(text, tokens)) is None:
            return Chosen(None, f"The model's own chat template is not stable ({causes}), and none of ours fits it.")
        return Chosen(ours, f"The model's own chat template is not stable ({causes}): {ours.name} takes its place.")
    except TemplateFailed:
        return Chosen(None, "The model's folder holds no chat template that can be read.")
