"""The page troubleshooting.md, made from the code of the package: python docs/troubleshooting.py prints it.

Errors have their cause and remedy in their docstrings, reasons in their two texts. Those of warnings and lines are in `SAID`.
No file holds the page: mkdocs asks for it when it builds the site (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

from typing import Any

from messages import Error, Line, Reason, errors, lines, reasons

NOTHING = "Nothing needs to be done."
HEAD = """\
# Troubleshooting

Search this page for the words of a message: values are written as `…`. Each message has its cause and what to do about it. A
run without a plan trains like a plain run.

"""
SAID: dict[tuple[str, str], tuple[str, str]] = {
    # (file, how the line begins): (cause, remedy)
    ("_registration.py", "MemOpt: the strategies"): (
        "The strategies do not work with the installed version of Lightning.",
        "Install a tested version, or use `optimize` in a loop.",
    ),
    ("callbacks/batch_scaler.py", "MemOpt: BatchNorm"): (
        "BatchNorm computes statistics of a batch, and batches are larger now.",
        "Nothing, if that is fine for you. Otherwise set `max_size`, or use a norm that does not depend on the batch.",
    ),
    ("callbacks/batch_scaler.py", "MemOpt: drop_last=True"): (
        "The last batch of an epoch, which is dropped, may be larger now.",
        "Nothing, if a few samples do not matter. Otherwise set `drop_last=False`.",
    ),
    ("callbacks/batch_scaler.py", "MemOpt: learning rates"): ("You asked for it by `lr_scaling`.", NOTHING),
    ("callbacks/batch_scaler.py", "MemOpt: one batch"): (
        "A larger batch would mean fewer updates, and there is no accumulation to reduce instead.",
        "Set `accumulate_grad_batches` above 1, or `keep_effective=False`.",
    ),
    ("callbacks/batch_scaler.py", "MemOpt: … count batches"): (
        "These options of the Trainer are numbers of batches, and each has more samples now.",
        "Divide them by the factor, or give them as fractions of an epoch.",
    ),
    ("callbacks/monitor.py", "MemOpt: … failed"): (
        "A measurement or the logger raised an error.",
        "Fix what the message names. Until then the figure has no value.",
    ),
    ("bench/compare.py", "MemOpt: time is up"): ("The bench has reached its time limit.", "Run it again to go on."),
    ("bench/compare.py", "MemOpt: no pictures"): ("Pictures need matplotlib.", "Run the command that the line ends with."),
    ("fabric/models.py", "MemOpt: there is no plan"): (
        "The plan needs to know which model an optimizer updates.",
        "Give both to one `fabric.setup(model, optimizer)`.",
    ),
    ("integrations/accelerate.py", "MemOpt: …\n…"): ("The run is over: this is its table.", NOTHING),
    ("integrations/accelerate_batch_size.py", "MemOpt: batch size"): ("The search for a batch size has ended.", NOTHING),
    ("integrations/accelerate_batch_size.py", "MemOpt: the batch size is the starting one"): (
        "Sizes are tried on the model that the function prepares; the line says what it did.",
        "Prepare one model with its optimizer inside of the function, and let it train.",
    ),
    ("fitting/patience.py", "MemOpt: after"): (
        "`memopt fit` runs the script up to its fourth update, and its steps have many operators, or much comes before them.",
        "Wait, or make its steps shorter. When `--time-limit` is over, the script is left, and a line says so.",
    ),
    ("integrations/checkpointing.py", "MemOpt: gradient checkpointing in compiled code"): (
        "The checkpointing is part of the compiled code.",
        NOTHING,
    ),
    ("integrations/checkpointing.py", "MemOpt: gradient checkpointing is back"): (
        "Without a plan, the model's own checkpointing lowers its memory.",
        "Read the line that says why there is no plan.",
    ),
    ("integrations/checkpointing.py", "MemOpt: gradient checkpointing is replaced"): (
        "A plan within the budget costs less than running each layer again.",
        NOTHING,
    ),
    ("integrations/strangers.py", "MemOpt: another model is trained"): (
        "The model of the run no longer trains. Another model does: a copy of it, or the model of the next fold.",
        "Open a run for each model that trains, with its optimizer.",
    ),
    ("integrations/checkpointing.py", "MemOpt: gradient checkpointing stays"): (
        "This kind of checkpointing cannot be switched off and on.",
        "Leave checkpointing out of the model, because the plan lowers its memory.",
    ),
    ("integrations/transformers.py", "MemOpt: parameters are updated after backward"): (
        "Early updates would change this training; the line says why.",
        "See [early updates](#why-parameters-are-not-updated-early).",
    ),
    ("integrations/launch.py", "MemOpt: nothing was planned"): (
        "The launcher plans what a script passes to `Accelerator.prepare`, and this script passed nothing.",
        "Put the loop into `optimize(...)`, as the line says.",
    ),
    ("integrations/launch.py", "MemOpt: off"): ("`MEMOPT_DISABLE` is set.", "Unset it to train within the budget."),
    ("cxx.py", "MemOpt: building"): (
        "A part in C++ is used for the first time with this torch and Python.",
        "Wait once. `memopt build` builds all parts ahead, for containers and for machines without a compiler.",
    ),
    ("cxx.py", "MemOpt: … was built"): ("A part in C++ was built, and will be used again.", NOTHING),
    ("native/counting.py", "MemOpt: the native memory meter"): (
        "There is no compiler, or the meter does not suit this torch.",
        "Install a C++ compiler, or accept that these steps are not measured.",
    ),
    ("native/engine/__init__.py", "MemOpt: the native engine is not there"): (
        "There is no compiler, or the engine does not suit this torch.",
        "Install a C++ compiler, or accept slower steps; results are the same.",
    ),
    ("report/run.py", "MemOpt: the report"): (
        "The page or its record could not be written when the run ended, for the reason named.",
        "Give `report=` a path that can be written to. The training itself is not affected.",
    ),
    ("runtime/early_updates.py", "MemOpt: backward raised"): (
        "An exception was raised in the middle of a backward that updates parameters.",
        "Restore a checkpoint. Set `optimizer_in_backward='never'` if backward may raise.",
    ),
    ("runtime/early_updates.py", "MemOpt: the tensor"): (
        "A branch of the loss outside of the model's forward began in a later step, and backward needs a weight for it.",
        "Make the branch in the first steps, too, or in the model's forward; or set `optimizer_in_backward='never'`.",
    ),
    ("runtime/engine/observing.py", "MemOpt: running"): (
        "An op gave other bits when it ran a second time: it is not deterministic.",
        "Use deterministic algorithms to have it rebuilt. Otherwise its result is kept, and nothing is wrong.",
    ),
    ("integrations/to_device.py", "MemOpt: the weights"): (
        "A front is about to move a model to a device, and the budget, or the device, has no room for all of its weights.",
        "Nothing, if they, or frozen ones, stay in the host's memory. Otherwise do what the line says, or set a larger budget.",
    ),
    ("runtime/parked_gradients.py", "MemOpt: gradients that the plan parks"): (
        "The plan copies gradients to a tier in backward. One cannot be written there, or it is not the one that autograd "
        "has made, and stays on the device: it has the right bits, but a step may take more bytes than predicted. Or the run "
        "has ended, and the device has no room for all of them: they stay in the tier, where they can be read.",
        "Make room in the tier. At the end of a run: nothing, or free them (`zero_grad()`) before it.",
    ),
    ("session/parked_states.py", "MemOpt: gradients that the plan parks stay on the device"): (
        "There is no memory for them in the tier, or the device cannot read it.",
        "Do what the line says, or set a larger budget.",
    ),
    ("runtime/state_copies.py", "MemOpt: optimizer state that the plan parks"): (
        "The plan copies optimizer state to a tier between updates. Other code reads some of it or holds it, or it cannot be "
        "written. It has the right bits wherever it is, but a step takes more bytes than predicted.",
        "Let go of checkpoints and state dicts that the loop holds, or make room in the tier.",
    ),
    ("runtime/pool/windows.py", "MemOpt: a step differs"): (
        "The step made other requests to the allocator than the planned step.",
        "Nothing, if this is rare. Otherwise pad batches to a few shapes.",
    ),
    ("runtime/pool/windows.py", "MemOpt: no planned pool for this batch"): (
        "The requests of this batch cannot have addresses, for the reason named.",
        "Leave `pool` out, or raise the budget.",
    ),
    ("runtime/pool/windows.py", "MemOpt: … steps in a row"): ("The loop has changed since its requests were logged.", NOTHING),
    ("runtime/tiers/streams.py", "… of host memory"): (
        "The system lets this user lock less memory.",
        "Raise `ulimit -l`; until then copies are slow.",
    ),
    ("session/ranks/agreement.py", "MemOpt: rank … decides by itself"): (
        "Only a part of the ranks has opened a run.",
        "Open the run on every rank, before the first forward.",
    ),
    ("session/budget.py", "MemOpt: other programs now leave"): (
        "Another program has taken memory of the device since the run began.",
        "Lower the budget, or end the other program.",
    ),
    ("session/budget.py", "MemOpt: the budget is"): (
        "Another program has memory of the device.",
        "End the other program to have all of the budget.",
    ),
    ("session/regions/compiled_regions.py", "MemOpt: compiled regions stay"): (
        "The ranks do not agree on what is compiled, or it cannot be planned.",
        "Make the change that the line names, or leave the model eager.",
    ),
    ("session/regions/compiled_regions.py", "MemOpt: compiling"): ("The step does not fit with the present regions.", NOTHING),
    ("session/regions/compiled_regions.py", "MemOpt: … of … compiled regions"): (
        "Regions have plans from an earlier run.",
        NOTHING,
    ),
    ("session/tiling.py", "MemOpt: no loss head"): (
        "Logits are large, the budget does not hold the step as it is, and the line says why the head stays whole.",
        "Set `tile='off'` to hear no more of it.",
    ),
    ("session/tiling.py", "MemOpt: tiles are compared again"): (
        "The head is zero, nearly all labels of the batch are ignored, or the loss is nan: such numbers prove nothing.",
        "Nothing, if a later step is different; the budget is not kept before one is.",
    ),
    ("session/loss_head.py", "MemOpt: …. Their bits"): ("Tiles keep the budget in the least time.", NOTHING),
    ("session/tiling.py", "MemOpt: …, which are made in tiles"): (
        "The loop read logits, or held them while weights were updated. Then they are made whole, which takes their memory.",
        "Delete them before `optimizer.step()` (`del outputs`), or read them in fewer steps.",
    ),
    ("session/regions/compiling.py", "MemOpt: compiling"): ("`compile=True` was given.", NOTHING),
    ("session/regions/compiling.py", "MemOpt: the model is compiled already"): ("You compile it, too.", "Leave one out."),
    ("session/early_updates.py", "MemOpt: parameters are updated after backward"): (
        "Early updates would change this training; the line says why.",
        "See [early updates](#why-parameters-are-not-updated-early).",
    ),
    ("session/early_updates.py", "MemOpt: … of … parameters"): (
        "The others are shared, read later, or get their gradient in parts.",
        NOTHING,
    ),
    ("session/observe/failed.py", "MemOpt: a step without a plan"): (
        "The step needs more than the budget, and nothing lowers it.",
        "Mend why there is no plan, make the batch smaller, or the budget larger.",
    ),
    ("session/solve/foresight.py", "MemOpt: the step does not fit"): ("The unmodified step is above the budget.", NOTHING),
    ("session/parked_states.py", "MemOpt: optimizer state is not parked"): (
        "Parameters are updated a few at a time while the state of the others is in a tier. Only of torch's own optimizers is "
        "it known that this gives the same bits, and of registered ones.",
        "What the line says. Otherwise nothing: the plan keeps the budget without it, or another line says that none does.",
    ),
    ("session/parked_states.py", "MemOpt: gradients stay on the device"): (
        "A plan parks gradients that have memory of their own and that an optimizer of torch reads, in a run of one process "
        "with the native engine. The budget is looked for without room for these.",
        "What the line says. Otherwise nothing: the plan keeps the budget without it, or another line says that none does.",
    ),
    ("session/solve/solving.py", "MemOpt: parked between updates"): (
        "With `offload=`, the state rests in the tier between updates, because the budget needs the bytes.",
        NOTHING,
    ),
    ("session/solve/solving.py", "MemOpt: on the device only while"): (
        "With `offload=`, weights rest in the tier while other modules run, because the budget needs the bytes.",
        NOTHING,
    ),
    ("session/parked_weights.py", "MemOpt: weights are not parked"): (
        "The plan could park weights, but not here, for the reason named.",
        "What the line says. Otherwise nothing: the plan keeps the budget without it, or another line says that none does.",
    ),
    ("session/parked_weights.py", "MemOpt: weights stay on the device"): (
        "A plan parks the weights of a module that runs once in the forward and once in backward, if nothing else reads or "
        "writes them. The budget is looked for without room for these.",
        "If the bytes matter: call the module as a part of the model, once. Give each weight a memory of its own "
        "(`p.data = p.data.clone()`).",
    ),
    ("session/parked_weights.py", "MemOpt: weights that the plan parks"): (
        "The tier has no room for some of the weights that the plan parks, or there is no native engine. Bits are right, but a "
        "step takes more bytes than predicted.",
        "Do what the line says.",
    ),
    ("session/parked_weights.py", "MemOpt: an observed step has no memory left"): (
        "The step took more than the device has, with all saved tensors dropped that can be. Weights make room for it.",
        "Nothing. That step takes longer, and later ones begin so. `to_device` leaves weights in the host's memory from the "
        "beginning.",
    ),
    ("session/parked_weights.py", "MemOpt: weights stay in the tier, and are read there"): (
        "The run is over, and the device has no room for what it parked. Bits are right; reads of such weights take longer.",
        "Nothing, or free memory of the device before the run ends.",
    ),
    ("runtime/parked_weights.py", "MemOpt: weights that the plan parks"): (
        "A weight could not be copied to the tier, or NumPy has its address, so it stays on the device: bits are right, but a "
        "step takes more bytes than predicted.",
        "Do what the line says.",
    ),
    ("session/parked_weights.py", "MemOpt: the weights of"): (
        "`to_device` parked them before the run. Without `offload`, a plan cannot decide which of them come to the device.",
        "Set `offload` as the line says: the plan keeps those on the device for which the budget has room.",
    ),
    ("session/pooling.py", "MemOpt: no planned pool:"): (
        "The pool cannot be installed, for the reason named.",
        "Leave `pool` out, or end the other run that has it.",
    ),
    ("session/pooling.py", "MemOpt: planned pool in force"): ("The arena is there.", NOTHING),
    ("session/session.py", "MemOpt: DistributedDataParallel"): ("DDP orders its buckets after the first step.", NOTHING),
    ("session/observe/silence.py", "MemOpt: batches of ever new shapes"): (
        "Each plan serves batches of one size, or a little smaller ones.",
        "Pad batches to a few lengths, or sort them by length.",
    ),
    ("session/observe/silence.py", "MemOpt: there is no plan yet"): (
        "No whole step was seen; the line says what is missing.",
        "See [no plan yet](#why-there-is-no-plan-yet).",
    ),
    ("session/regions/compiled_regions.py", "MemOpt: …"): (
        "Nothing can be rebuilt inside of compiled code: its backend or its kind has no joint graph that could be changed.",
        "Leave these layers eager, or compile with the backend that the line names.",
    ),
    ("session/solve/foreseen.py", "MemOpt: … is the plan of this step"): (
        "The first step is the one that `memopt fit` recorded, and the budget holds by its plan.",
        NOTHING,
    ),
    ("session/solve/foreseen.py", "MemOpt: … is taken as the start"): (
        "The first step is of another batch or length than `memopt fit` recorded, or more is in memory than it counted.",
        "Nothing: the budget is kept. To spare the search, ask `memopt fit` about this batch, on a slightly smaller card.",
    ),
    ("session/parking/offloading.py", "MemOpt: nothing is offloaded"): (
        "The device has no memory of its own: what is copied to the host's stays where it is.",
        'Nothing. To park on a disk, set `offload="disk"`.',
    ),
    ("session/solve/solving.py", "MemOpt:   …"): ("What the solver is doing, at `logging.DEBUG`.", NOTHING),
    ("session/solve/solving.py", "MemOpt: no plan is smaller"): (
        "No tensor that a plan could drop is in memory at the peak.",
        "One of the remedies at the end of the line.",
    ),
    ("session/solve/solving.py", "MemOpt: no saved tensor is parked"): (
        "To run ops again takes less time than to copy their results over this link, or no plan that parks was found in time.",
        "Nothing: the plan keeps the budget. `recompute=False` parks whatever the link's speed.",
    ),
    ("session/solve/solving.py", "MemOpt: … of results of convolutions"): (
        "`torch.backends.cudnn.benchmark` is on, or was: cuDNN times its algorithms in each thread, and backward has another "
        "thread than the forward, so a rebuild might run another algorithm, which gives other bits.",
        "Nothing, where the budget is kept; else leave `torch.backends.cudnn.benchmark` False from the start of the process.",
    ),
    ("session/solve/solving.py", "MemOpt: plan in force"): ("A plan was found.", NOTHING),
    ("session/solve/solving.py", "MemOpt: … of … parameters"): (
        "With `optimizer_in_backward='auto'`, a plan updates as few parameters in backward as its budget needs.",
        "Nothing; `optimizer_in_backward='always'` updates all of them there.",
    ),
    ("session/solve/solving.py", "MemOpt: solving"): ("The observed steps are being planned.", NOTHING),
    ("session/measure/between.py", "MemOpt: … bytes"): (
        "Code between two steps takes memory: a teacher's forward, a copy of the weights, an evaluation. No plan changes it.",
        "Run that code under `torch.no_grad()` or on smaller batches, delete what it need not keep, or raise the budget.",
    ),
    ("session/judge/states.py", "MemOpt: a step took more"): ("The step has changed since it was observed.", NOTHING),
    ("session/judge/states.py", "MemOpt: a step took …; where"): (
        "This step did more than those that were observed.",
        "Nothing, if it is rare or fits; else raise `profile_steps`, so that such a step is among the first ones.",
    ),
    ("session/judge/states.py", "MemOpt: a step that takes more"): (
        "Some steps do more than others (every third one, say). The plan will serve them, too.",
        NOTHING,
    ),
    ("session/judge/states.py", "MemOpt: that step shows"): (
        "It was observed because steps took more than predicted, and does not show why. The smaller plan made for them stays.",
        NOTHING,
    ),
    ("session/observe/observed_step.py", "MemOpt: observing"): ("A run has begun.", NOTHING),
    ("session/observe/observed_step.py", "MemOpt: parameters are on"): (
        "The model is spread over several devices, and a plan is made for one: that of its first parameter.",
        "Put the model on one device. Else its steps take on the other devices what they take without MemOpt.",
    ),
    ("session/observe/observed_step.py", "MemOpt: backwards run between"): (
        "The loop calls the model again while earlier graphs are held, and runs backwards between (of another model, say).",
        "Run the backwards after the last call, or let go of the graphs: a plan then serves all calls.",
    ),
    ("session/judge/drift.py", "MemOpt: the tier has no room"): (
        "The plan was made for one forward at a time, and the budget of the tier leaves no room for another one.",
        "Set a larger `host_budget` or `disk_budget`, or end each forward by its backward before the next one begins.",
    ),
    ("session/judge/drift.py", "MemOpt: the forward left the plan"): (
        "This forward runs other ops than the observed ones (a branch, another shape).",
        "Nothing, if it is rare: the step is exact. Else make the step the same each time.",
    ),
    ("session/observe/observing.py", "MemOpt: the step changed"): ("Two observed steps ran other ops.", NOTHING),
    ("session/observe/observing.py", "MemOpt: this model trains without a plan"): (
        "Every forward is another one, so no plan would match.",
        "Take random branches out of the forward, or give them a fixed order.",
    ),
    ("session/judge/peaks.py", "MemOpt: …"): (
        "A step was measured above the budget and no smaller plan exists; or some steps do more than others, at no regular "
        "distance.",
        "Raise the budget to what the line names, or make the batch smaller; in the second case, raise `profile_steps`, so "
        "that such a step is among the first ones.",
    ),
    ("session/judge/states.py", "MemOpt: …"): ("The plan of a larger batch does not serve this one.", NOTHING),
    ("session/judge/states.py", "MemOpt: … forwards in a row"): ("The step has changed for good.", NOTHING),
    ("session/judge/states.py", "MemOpt: …; observing again"): ("A step was above the budget; it may have changed.", NOTHING),
    ("session/judge/states.py", "MemOpt: …; observing a step"): (
        "The plan of `memopt fit` was in force without a search, and a step was measured above the budget.",
        NOTHING,
    ),
    ("session/judge/states.py", "MemOpt: …; replanned"): (
        "A step was measured above the budget, and a smaller plan took its place.",
        "Set `headroom` if the first planned step must not exceed the budget.",
    ),
    ("solvers/planner.py", "… plans made"): (
        "Steps are short, so faster plans are searched for only as long as 50 steps take, or 1 second.",
        "None; larger batches or models are searched for longer.",
    ),
    ("session/solve/solving.py", "MemOpt: smaller plans"): (
        "With `budget=\"min\"`, the smallest plan would make steps slower than `max_slowdown` allows.",
        "Give a larger `max_slowdown` for fewer bytes (`math.inf`: the smallest plan, however slow), or a budget in bytes.",
    ),
    ("solvers/planner.py", "time limit"): ("The search has ended early.", "Give more `solver_seconds` for a better plan."),
    ("strategies/mixin.py", "MemOpt: this checkpoint was saved"): (
        "Backward raised in the middle of early updates, and a checkpoint was saved after that.",
        "Go on from an earlier checkpoint.",
    ),
    ("telemetry/energy.py", "MemOpt: no energy"): ("The counter cannot be read.", "Fix what the line names, or go without."),
    ("trace/memory.py", "MemOpt: steps in which another profiler runs"): (
        "Another profiler of torch is running.",
        "Stop it, or install a C++ compiler: the native meter does not disturb it.",
    ),
    ("versions.py", "MemOpt: torch … is outside"): (
        "This torch was not tested.",
        "Install a torch of the range, or a newer lightning-memopt.",
    ),
}  # fmt: skip
_ABOVE = "MemOpt: a planned step was measured at … bytes (…), … above the budget; the plan predicted …"
LOOKS: dict[tuple[str, str], tuple[str, ...]] = {
    # the words of lines of which the code that says them shows a part only
    ("integrations/accelerate.py", "MemOpt: …\n…"): ("MemOpt: NAME OF A MODEL (its table)",),
    ("session/regions/compiled_regions.py", "MemOpt: …"): (
        "MemOpt: nothing can be rebuilt inside of compiled code (…): the plan leaves its memory as it is. …",
    ),
    ("session/solve/solving.py", "MemOpt:   …"): ("MemOpt:   NAME OF A SOLVER, … levels",),
    ("session/judge/peaks.py", "MemOpt: …"): (
        f"{_ABOVE}, and no smaller plan exists. Set …",
        "MemOpt: a step took …, and the smallest plan was to take …: some steps do more than those that were observed.",
    ),
    ("session/judge/states.py", "MemOpt: …"): ("MemOpt: a batch cannot borrow another one's plan …",),
    ("session/judge/states.py", "MemOpt: …; observing again"): (f"{_ABOVE}; observing again (… of …)",),
    ("session/judge/states.py", "MemOpt: …; replanned"): (f"{_ABOVE}; replanned with …",),
}  # fmt: skip
EARLY = ("early_updates.py", "session/ranks/processes.py", "integrations/")
"""Files whose reasons are about early updates."""


def told(line: Line) -> bool:
    """Whether the line has words of its own: the text of others is made elsewhere, and is there."""
    return bool(line.text.strip("… \n"))


def key_of(line: Line) -> tuple[str, str]:
    """The entry of `SAID` for a line: the longest one that it begins with. Raises KeyError where there is none."""
    if (line.path, line.text) in SAID:
        return line.path, line.text
    keys = [key for key in SAID if key[0] == line.path and line.text.startswith(key[1]) and key[1] != "MemOpt: …"]
    if not keys:
        raise KeyError(f"{line.path} says {line.text!r}: give it a cause and a remedy in docs/troubleshooting.py")
    return max(keys, key=lambda key: len(key[1]))


def cell(text: str) -> str:
    """The text on one line, as code: it may have characters that mean something on a page."""
    return f"`` {' '.join(text.replace('|', '/').split())} ``"


def shown(line: Line) -> str:
    """The words of a line, or of those that begin as it does."""
    return " or ".join(map(cell, LOOKS.get(key_of(line), (line.text,))))


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.split(" | ")
    bars = [f"| {' | '.join(cells)} |" for cells in (tuple(columns), ("---",) * len(columns), *rows)]
    return "\n".join(bars) + "\n"


def of_reasons(chosen: list[Reason]) -> str:
    return table("the line says | what to do", [(cell(r.what), f"{r.fix}.") for r in chosen])


def of_error(error: Error) -> str:
    bases = ", ".join(base.rpartition(".")[2] for base in error.bases)
    text = f"### {error.name}\n\n{error.cause} (A {bases}.)\n\nWhat to do: {error.remedy}\n"
    return text + "".join(f"\n- {cell(message)}" for message in error.messages) + ("\n" if error.messages else "")


def page() -> str:
    said = [(shown(line), *SAID[key_of(line)]) for line in lines() if told(line)]
    early = [r for r in reasons() if any(part in r.path for part in EARLY)]
    parts = [
        "## Why there is no plan yet\n\nA warning, once a run: `MemOpt: there is no plan yet, because …`\n",
        of_reasons([r for r in reasons() if r not in early]),
        "## Why parameters are not updated early\n\nA line: `MemOpt: parameters are updated after backward, as usual: …`\n",
        of_reasons(early),
        "## Warnings and lines\n",
        table("message | cause | what to do", [row for row in said if row[2] != NOTHING]),
        "These say what is going on, and ask for nothing:\n",
        table("message | cause", [row[:2] for row in said if row[2] == NOTHING]),
        "## Errors\n\nEach is a `MemOptError`. Messages say what was wrong, the numbers, and what to do.\n",
        *(of_error(error) for error in errors()),
    ]
    return HEAD + "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files that it found: adds the page to them."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "troubleshooting.md", content=page()))
    return files


if __name__ == "__main__":
    print(page(), end="")
