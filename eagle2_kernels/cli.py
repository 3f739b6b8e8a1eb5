"""The ``eagle2`` command: generate, tree, eval, tune, data, train, info.

Every default is the recommended value. Errors a person can act on are one line on stderr and exit
code 1; wrong usage is exit code 2.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import json
import sys
import textwrap
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ._version import __version__
from .decode import SamplingParams, TreeConfig
from .demo import DEMO_TREE
from .training.generate import DataConfig
from .training.progress import ProgressBar
from .training.trainer import TrainConfig

if TYPE_CHECKING:
    from .compare import Comparison
    from .decode import EagleDecoder
    from .evaluation import Evaluation

app = typer.Typer(
    name="eagle2",
    help="EAGLE-2 speculative decoding: faster generation with the same output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=False, highlight=False)

Prompt = Annotated[str, typer.Argument(help="The user's message; '-' reads it from stdin.")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", help="Hugging Face model, directory or hub name. Default: the demo's."
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help="EAGLE head, directory or hub name. Default: the demo's."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16, float32 or float64. Default: that of the model's files; "
        "for the demo bfloat16 where the machine is fast at it, else float32.",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="For models not of Llama's kind, which need it not: compile the layers into fused CPU "
        "kernels first. Some ten seconds, with g++.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens at most.")]
MaxNodes = Annotated[
    int | None,
    typer.Option(
        "--max-nodes",
        min=1,
        help=f"Slots of a tree, root included. Default: {TreeConfig.max_nodes}; "
        f"the demo's: {DEMO_TREE[0]}.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--tree-top-k", min=1, help=f"Branches kept per level. Default: {TreeConfig.top_k}."
    ),
]
MaxDepth = Annotated[
    int | None,
    typer.Option(
        "--max-depth",
        min=1,
        help=f"Draft levels. Default: {TreeConfig.max_depth}; the demo's: {DEMO_TREE[2]}.",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]


@app.command()
def generate(
    prompt: Prompt,
    target: TargetOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    compile: CompileOption = False,
    max_new_tokens: MaxNewTokens = 128,
    max_nodes: MaxNodes = None,
    tree_top_k: TopK = None,
    max_depth: MaxDepth = None,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sampling filter; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Above 0; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: drawn; --json reports it.")] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens seen in prompt or answer; 1 is off.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken from a token's logit per time it was generated; 0 is off.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken once from each generated token's logit; 0 is off.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE", help="Added to a token's logit; -inf bans it. Repeatable."
        ),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly and with Hugging Face; greedy.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of --compare.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
) -> None:
    """Answer a prompt with the EAGLE-2 tree, streaming the text."""
    if compare and temperature > 0:
        raise typer.BadParameter("--compare is greedy: leave --temperature at 0")
    if logprobs and (compare or not as_json):
        raise typer.BadParameter("--logprobs goes with --json and without --compare")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=_bias(logit_bias or []),
        logprobs=logprobs,
    )
    if compare and sampling.edits_logits:
        raise typer.BadParameter("--compare decodes without logit bias and penalties")
    message = _read(prompt)
    decoder = _load(target, draft, dtype, max_nodes, tree_top_k, max_depth, compile)
    ids = _encode(decoder, message, raw)
    text = ""
    if as_json:
        result = decoder.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling)
        text = result.text
    else:
        for piece in decoder.stream(ids, max_new_tokens=max_new_tokens, sampling=sampling):
            console.out(piece, end="")
            console.file.flush()
        console.print()
    if compare:
        from .compare import compare as run_comparison

        if not as_json:
            typer.echo(f"\ntiming three ways of decoding it, {rounds} + 1 times each ...", err=True)
        comparison = run_comparison(decoder, ids, max_new_tokens, rounds)
        if as_json:
            _print_json(text=text, **_comparison_dict(comparison))
        else:
            _print_comparison(decoder, comparison)
        if not comparison.lossless:
            raise typer.Exit(1)
    elif as_json:
        stats = dataclasses.asdict(result.stats)
        extra = {"logprobs": result.logprobs} if logprobs else {}
        _print_json(text=text, token_ids=result.token_ids, **extra, stats=stats)


@app.command()
def tree(
    prompt: Prompt,
    target: TargetOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    max_nodes: MaxNodes = None,
    tree_top_k: TopK = None,
    max_depth: MaxDepth = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
) -> None:
    """Draw the first step's draft tree: tokens, path probabilities, what was pruned, accepted."""
    from rich.tree import Tree

    message = _read(prompt)
    decoder = _load(target, draft, dtype, max_nodes, tree_top_k, max_depth)
    step = decoder.draft_step(_encode(decoder, message, raw))
    root = int(step.tree.draft_tokens[0, 0])
    nodes = {-1: Tree(Text(repr(_token_text(decoder, root))))}
    # A candidate is drawn when it was kept, or when its parent was and it lost to the kept ones.
    for index, candidate in enumerate(step.candidates):
        parent = nodes.get(candidate.parent)
        if parent is None or candidate.probability == 0:
            continue
        label = Text(f"{_token_text(decoder, candidate.token)!r}  {candidate.probability:.3f}")
        if candidate.slot in step.accepted:
            label.stylize("bold green")
            label.append("  accepted")
        elif candidate.slot < 0:
            label.stylize("dim")
            label.append("  pruned")
        node = parent.add(label)
        if candidate.slot >= 0:
            nodes[index] = node
    console.print(nodes[-1])
    drafted = int(step.tree.num_nodes[0]) - 1
    console.print(
        f"{len(step.accepted) - 1} of {drafted} drafted tokens accepted; the target's own next "
        f"token is {_token_text(decoder, step.emitted[-1])!r}"
    )


@app.command()
def info(
    ops: Annotated[bool, typer.Option("--ops", help="List the operators instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """What is installed and loaded here (the report of `python -m eagle2_kernels.env`)."""
    from . import env
    from . import ops as table

    if ops:
        rows = [{"name": op.name, "schema": op.schema, "summary": op.summary} for op in table.OPS]
        console.out(json.dumps(rows, indent=2) if as_json else table.describe(), end="")
        return
    report = env.collect()
    console.out(json.dumps(report, indent=2) if as_json else env.render(report))


def _docs(kind: type) -> dict[str, str]:
    """Docstrings written below a dataclass's fields."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(doc.value).split())  # type: ignore[union-attr]
    return docs


def _parameters(kind: type) -> inspect.Signature:
    """One option per field of a configuration, with its default and its docstring as help."""
    docs, hints = _docs(kind), typing.get_type_hints(kind)
    parameters = []
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            continue
        required = field.default == ""
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=... if required else field.default,
                annotation=Annotated[hints[field.name], typer.Option(help=docs.get(field.name))],
            )
        )
    return inspect.Signature(parameters)


def _train(**options: Any) -> None:
    """Train a draft head on text the target wrote."""
    from .training.plot import read_log
    from .training.trainer import train

    config = TrainConfig(**options)
    directory = train(config)
    _, validation = read_log(Path(config.work_dir) / "log.jsonl")
    best = max(validation, key=lambda row: row["accept_length"])
    console.print(
        f"best validation: accept length {best['accept_length']:.3f}, top 1 {best['top1']:.3f}, "
        f"top 4 {best['top4']:.3f} at step {best['step']}"
    )
    console.print(
        f"head saved to {directory}" if directory else f"stopped early; resume {config.work_dir}"
    )


def _data(**options: Any) -> None:
    """Let the target write training text for a head."""
    from .training.generate import write_text

    with ProgressBar() as progress:
        count, tokens = write_text(DataConfig(**options), progress)
    console.print(f"{count} conversations, {tokens} tokens written to {options['output']}")


_train.__signature__ = _parameters(TrainConfig)  # type: ignore[attr-defined]
_data.__signature__ = _parameters(DataConfig)  # type: ignore[attr-defined]
app.command("train")(_train)
app.command("data")(_data)


@app.command("eval")
def evaluate_prompts(
    prompts: Annotated[
        str, typer.Option(help='A .jsonl file of {"prompt": text, "category"?: text}.')
    ],
    target: TargetOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    compile: CompileOption = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The first N prompts only, of those --every leaves.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Every N-th prompt only, from the first.")] = 1,
    max_new_tokens: MaxNewTokens = 128,
    max_nodes: MaxNodes = None,
    tree_top_k: TopK = None,
    max_depth: MaxDepth = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="Repeatable. Default: 0 and 1.")
    ] = None,
    hugging_face: Annotated[
        bool, typer.Option(help="Also run the model's own generate, plain and prompt lookup.")
    ] = True,
    assistant: Annotated[
        str | None,
        typer.Option(help="A smaller model for Hugging Face's assisted generation beside these."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Prompt i of the sampled runs has seed + i.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")
    ] = None,
    csv: Annotated[str | None, typer.Option(help="Append the rows to this file.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw histogram and categories here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure accept length and speed over a prompt set, beside plain decoding."""
    import torch

    from . import evaluation

    _check_files(("--csv", csv), ("--plot", plot))
    if threads:
        torch.set_num_threads(threads)
    chosen = evaluation.read_prompts(prompts)[::every][:limit]
    decoder = _load(target, draft, dtype, max_nodes, tree_top_k, max_depth, compile)
    helper = None
    if assistant is not None:
        from transformers import AutoModelForCausalLM

        helper = AutoModelForCausalLM.from_pretrained(assistant, dtype=decoder.target.dtype).eval()
    with ProgressBar() as progress:
        found = evaluation.evaluate(
            decoder,
            [(_encode(decoder, p.text, raw=False), p.category) for p in chosen],
            max_new_tokens=max_new_tokens,
            temperatures=temperature or (0.0, 1.0),
            hugging_face=hugging_face,
            assistant=helper,
            seed=seed,
            progress=lambda done, total: progress(done, total, "prompts"),
        )
    shape = dataclasses.asdict(decoder.config)
    dtype_name = str(decoder.target.dtype).removeprefix("torch.")
    common = {"file": Path(prompts).name, "dtype": dtype_name, **shape}
    # First the figures, so that a file that cannot be written does not lose them.
    if as_json:
        _print_json(**common, rows=found.as_dicts())
    else:
        _print_evaluation(found, common)
    if csv is not None:
        evaluation.append_csv(found, csv, common | {"max_new_tokens": max_new_tokens})
    if plot is not None:
        evaluation.plot(found, plot)
    if any(row.different for row in found.rows):
        typer.echo("eagle2: tree and plain tokens differ where rounding may part them", err=True)


def _threads() -> str:
    import torch

    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def _print_evaluation(found: Evaluation, common: dict[str, Any]) -> None:
    console.print(
        f"{common['file']}, {common['dtype']}, {_threads()}, tree of "
        f"{common['max_nodes']} nodes (top_k {common['top_k']}, max_depth {common['max_depth']})"
    )
    # A table for each temperature, so that a line fits into 80 columns.
    for temperature, rows in itertools.groupby(found.as_dicts(), lambda row: row["temperature"]):
        table = Table(title=f"temperature {temperature:g}", box=SIMPLE_HEAD, padding=0)
        for name in ("category", "decoding"):
            table.add_column(name)
        for name in ("prompts", "tokens", "accept", "tokens/s", "x plain", "differ"):
            table.add_column(name, justify="right")
        for row in rows:
            tau = row["accept_length"]
            table.add_row(
                row["category"],
                row["provider"].replace("Hugging Face", "HF"),
                str(row["prompts"]),
                str(row["new_tokens"]),
                "" if tau is None else f"{tau:.2f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}",
                str(row["different"]),
            )
        console.print(table)


@app.command("tune")
def tune_tree(
    target: TargetOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = None,
    compile: CompileOption = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            help='A .jsonl file of {"prompt": text} like your traffic. Default: built in.'
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The first N prompts only.")] = 8,
    max_depth: Annotated[int, typer.Option(min=1, help="Deepest tree considered.")] = 8,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=4, help="Tokens decoded of each prompt.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each step.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the curve here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Find the tree with the most expected tokens per second on this machine."""
    import torch

    from . import evaluation, tune

    _check_files(("--plot", plot))
    if threads:
        torch.set_num_threads(threads)
    asked = None
    if prompts is not None:
        asked = [p.text for p in evaluation.read_prompts(prompts)[:limit]]
    decoder = _load(target, draft, dtype, None, None, None, compile)
    found = tune.tune(
        decoder,
        asked,
        max_depth=max_depth,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        progress=lambda text: typer.echo(f"{text} ...", err=True),
    )
    if plot is not None:
        tune.plot(found, plot)
    if as_json:
        _print_json(**tune.as_dict(found))
        return
    table = Table(title=f"plain decoding: {1 / found.plain_seconds:.1f} tokens/s")
    for name in ("max_nodes", "top_k", "max_depth", "accept length", "ms a step", "tokens/s"):
        table.add_column(name, justify="right")
    for row in found.rows[:10]:
        table.add_row(
            str(row.max_nodes),
            str(row.top_k),
            str(row.max_depth),
            f"{row.accept_length:.2f}",
            f"{1e3 * row.seconds:.1f}",
            f"{row.tokens_per_second:.1f}",
        )
    console.print(table)
    best = found.best
    console.print(
        f"best: --max-nodes {best.max_nodes} --tree-top-k {best.top_k} "
        f"--max-depth {best.max_depth}, {found.speedup:.2f} times plain decoding expected"
    )


@app.callback(invoke_without_command=True)
def _version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit()


def _load(
    target: str | None,
    draft: str | None,
    dtype: str | None,
    max_nodes: int | None,
    top_k: int | None,
    max_depth: int | None,
    compile: bool = False,
) -> EagleDecoder:
    import torch

    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together: a head belongs to its target")
    torch_dtype = None
    if dtype is not None:
        torch_dtype = getattr(torch, dtype, None)
        if torch_dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise typer.BadParameter(
                f"--dtype: expected bfloat16, float16, float32 or float64, got {dtype}"
            )
    from .decode import EagleDecoder
    from .demo import load_demo

    if target is None or draft is None:
        decoder = load_demo(dtype=torch_dtype, compile=compile)
    else:
        decoder = EagleDecoder.from_pretrained(target, draft, dtype=torch_dtype, compile=compile)
    changes = {"max_nodes": max_nodes, "top_k": top_k, "max_depth": max_depth}
    decoder.config = dataclasses.replace(
        decoder.config, **{k: v for k, v in changes.items() if v is not None}
    )
    return decoder


def _check_files(*files: tuple[str, str | None]) -> None:
    """Before anything is measured: each file's directory is there, and what draws is installed."""
    for option, name in files:
        if name is None:
            continue
        if not Path(name).absolute().parent.is_dir() or Path(name).is_dir():
            raise typer.BadParameter(f"{option}: expected a file in a directory, got {name}")
        if option == "--plot" and importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("--plot: expected matplotlib to be installed")


def _encode(decoder: EagleDecoder, prompt: str, raw: bool) -> list[int]:
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise typer.BadParameter("--target: expected a directory with a tokenizer, found none")
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _bias(pairs: list[str]) -> dict[int, float] | None:
    """``ID=VALUE`` options as a map; None without any."""
    bias = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias: expected ID=VALUE, such as 42=-1.5 or 42=-inf, got {pair}"
            ) from None
    return bias or None


def _read(prompt: str) -> str:
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("prompt: expected some text, got none")
    return text


def _token_text(decoder: EagleDecoder, token: int) -> str:
    return decoder.tokenizer.decode([token])


def _comparison_dict(comparison: Comparison) -> dict[str, Any]:
    return {
        "rows": [
            dataclasses.asdict(row) | {"tokens_per_second": row.tokens_per_second}
            for row in comparison.rows
        ],
        "identical": comparison.difference is None,
        "verdict": comparison.verdict,
        "difference": comparison.difference and dataclasses.asdict(comparison.difference),
        "row_floor": comparison.row_floor,
        "identical_when_padded": comparison.identical_when_padded,
    }


def _print_comparison(decoder: EagleDecoder, comparison: Comparison) -> None:
    config = decoder.config
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    table = Table(
        title=f"{dtype}, {_threads()}, tree of {config.max_nodes} nodes "
        f"(top_k {config.top_k}, max_depth {config.max_depth})"
    )
    for name in ("decoding", "tokens", "tokens/s", "x plain", "target forwards", "accept length"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    plain = next(row for row in comparison.rows if row.name == "plain")
    for row in comparison.rows:
        table.add_row(
            row.name,
            str(row.new_tokens),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / plain.tokens_per_second:.2f}",
            str(row.target_forwards),
            f"{row.accept_length:.2f}",
        )
    console.print(table)
    console.print(Text(comparison.verdict))


def _print_json(**values: Any) -> None:
    console.out(json.dumps(values, default=str))


def main() -> None:
    """Entry point of the ``eagle2`` script."""
    try:
        app()
    except (ValueError, TypeError, RuntimeError, OSError, NotImplementedError) as error:
        print(f"eagle2: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
