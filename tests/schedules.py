"""Orders of stages for --ampipe-schedule, as a user could write them; docs/schedules.md shows the first."""

from megatron_ampipe.schedule import BlockFeatures


def interleaved(degree: int, features: BlockFeatures) -> str:
    """The experts of a chunk run after the attention of the next chunk, not after that of all chunks."""

    def of(chunk: int, kinds: str) -> list[str]:
        return [f"{kind}.{chunk}" for kind in kinds.split()] if 0 <= chunk < degree else []

    compute, comm = ([] if features.chunked_qkv else ["qkv"]), []
    for chunk in range(degree + 2):
        compute += of(chunk, "qkv attention route" if features.chunked_qkv else "attention route")
        compute += of(chunk - 1, "shared expert") + of(chunk - 2, "merge")
        comm += of(chunk, "counts dispatch") + of(chunk - 1, "combine")
    gradients = [stage for stage in comm if not stage.startswith("counts")]
    return f"""schedule interleaved degree {degree}
        forward compute: {" ".join(compute)}
        forward comm: {" ".join(comm)}
        backward compute: {" ".join(reversed(compute))}
        backward comm: {" ".join(reversed(gradients))}"""


def loses_a_stage(degree: int, features: BlockFeatures) -> str:
    """A wrong order."""
    return interleaved(degree, features).replace(f" combine.{degree - 1}", "", 1)
