"""What looks like a secret, by its name or by its value: job scripts and manifests are readable for others."""

import re
from collections.abc import Iterable


def _any(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


_ANYWHERE = _any(
    rf"(.*_)?{word}(_.*)?"
    for word in (
        r"\w*secrets?", r"\w*tokens?", r"\w*passw(or)?ds?", r"\w*pass(phrase|code)s?", r"credentials?", r"creds?",
        r"authorization", r"bearer", r"jwt", r"cookies?", r"webhook", r"connection_string", r"\w*(api|private)_?keys?",
    )
)  # fmt: skip
"""Parts of a name such as DB_PASSWORD_2, in lower case, that tell of a secret wherever they stand."""

_LAST = _any(
    rf"(.*_)?{word}(_?\d+)?"
    for word in (
        r"(api|access|secret|private|ssh|auth|account|storage)?keys?", r"key_id", r"(ssh|db|pg|user|root)?pass", r"pat",
        r"o?auth2?", r"auth_(header|string|data)", r"sas", r"dsn",
    )
)  # fmt: skip
"""Those that do at a name's end: OPENAI_KEY, GITHUB_PAT, but not KEY_FORMAT. KEYBOARD is another word."""

_PASSWORD = re.compile(r".+_pwd")
"""PWD alone is the working directory."""

_HARMLESS = _any(
    (
        # Settings of libraries that take no secrets by them.
        r"(jax|xla|nccl|cuda|cudnn|cublas|omp|mkl|tf|tokenizers|ucx|fi|ofi|gloo|pmix?|ompi|slurm|pytorch|torch)_.*",
        # What is counted, marked or switched: MAX_TOKENS, EOS_TOKEN, HF_HUB_DISABLE_IMPLICIT_TOKEN.
        r"(.*_)?(max|min|num|per|count|batch|bos|eos|pad|unk|sep|cls|mask|stop|end|start|special)_tokens?(_.*)?",
        r"(.*_)?tokens?_(per|count|limit)(_.*)?",
        r"(.*_)?(disable|enable|use|skip|require|allow|no)_.*",
        # Keys that open nothing.
        r"(.*_)?(cache|public|sort|partition|primary|foreign|index|group|hash|lookup|config)_keys?",
        # Where something is, instead of what it is.
        r".*_(file|path|dir|folder|sock|socket|home)", r"google_application_credentials",
    )
)  # fmt: skip
"""Names that would be taken for a secret's, and are not."""

_VALUES = _any(
    (
        r"\bgh[pousr]_\w{16}", r"\bgithub_pat_\w{16}", r"\bglpat-[\w-]{16}", r"(?<![\w/.-])sk-[\w-]{16}",
        r"\b[sr]k_live_\w{16}", r"\b(AKIA|ASIA)[0-9A-Z]{16}\b", r"\bhf_[A-Za-z0-9]{24}",
        r"\bAIza[\w-]{30}", r"\bya29\.[\w-]{16}",
        r"\bxox[abeoprs]-[\w-]{10}", r"\bnpm_\w{30}", r"\bpypi-[\w-]{30}", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8}",
        r"-----BEGIN [A-Z ]*PRIVATE KEY", r"\b[Bb]earer +[\w.~+/-]{16}",
        r"://[^/\s:@$]*:[^/\s:@$]+@",  # a password in an address, unless it is filled in later: $NAME
    )
)  # fmt: skip
"""How values begin that services hand out as keys and tokens."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name would hold a secret: HF_TOKEN, openaiKey, DB_PWD."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if _HARMLESS.fullmatch(name):
        return False
    return any(pattern.fullmatch(name) for pattern in (_ANYWHERE, _LAST, _PASSWORD))


def holds_a_secret(text: str) -> bool:
    """Whether a text has a part with the form of a key or token."""
    return _VALUES.search(text) is not None
