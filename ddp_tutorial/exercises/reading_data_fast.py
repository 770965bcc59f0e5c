"""Exercise on contiguous ranges of files, for the `reading_data_fast` deep dive."""

from collections.abc import Sequence
from itertools import accumulate

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect

Range = tuple[int, int, int]  # file, begin, end

# Lengths of the files, and the number of ranks.
_CASES = (
    ([4, 4], 2),
    ([5, 3, 4], 2),
    ([5, 3, 4], 1),
    ([10], 3),
    ([3, 0, 4, 1], 3),
    ([1, 1, 1, 1, 1, 1, 1], 3),
    ([0, 0, 6, 0], 4),
    ([100, 1, 1], 4),
    ([2, 1], 5),
    ([1000, 7, 993], 8),
)


def _ranges(answer: Answer, lengths: list[int], rank: int, size: int, where: str) -> list[Range]:
    given = list(lengths)
    found = answer(given, rank, size)
    expect(given == lengths, "file_ranges must not change the list `lengths`.")
    expect(found is not None, "The result must be a list of (file, begin, end), got None.")
    try:
        ranges = [(int(file), int(begin), int(end)) for file, begin, end in found]
    except (TypeError, ValueError) as error:
        raise WrongAnswerError(
            f"{where}: the result must be a list of (file, begin, end), got {found!r}: {error}"
        ) from None
    for file, begin, end in ranges:
        expect(0 <= file < len(lengths), f"{where}: rank {rank} reads file {file}, which does not exist.")
        expect(begin != end, f"{where}: rank {rank} returns the empty range {(file, begin, end)}. Omit empty ranges.")
        expect(
            0 <= begin < end <= lengths[file],
            f"{where}: rank {rank} reads rows {begin} to {end} of file {file}, which contains {lengths[file]} rows.",
        )
    return ranges


def _test_ranges(answer: Answer) -> str:
    for lengths, size in _CASES:
        where = f"lengths {lengths} on {size} ranks"
        starts = [0, *accumulate(lengths)]
        parts = [_ranges(answer, lengths, rank, size, where) for rank in range(size)]
        rows = [[starts[file] + n for file, begin, end in part for n in range(begin, end)] for part in parts]
        every = [n for part in rows for n in part]
        missing = sorted(set(range(sum(lengths))) - set(every))
        expect(not missing, f"{where}: {len(missing)} rows are not read by any rank. The ranges are {parts}.")
        expect(len(every) == len(set(every)), f"{where}: some rows are read more than once. The ranges are {parts}.")
        counts = [len(part) for part in rows]
        expect(
            max(counts) - min(counts) <= 1,
            f"{where}: the ranks' row counts must differ by at most one, got {counts}.",
        )
        for rank, part in enumerate(rows):
            expect(
                part == list(range(part[0], part[0] + len(part))) if part else True,
                f"{where}: rank {rank} must read one contiguous range of rows, in order, got {parts[rank]}.",
            )
            files = [file for file, _, _ in parts[rank]]
            expect(
                len(files) == len(set(files)),
                f"{where}: rank {rank} must return one range per file, got {parts[rank]}.",
            )
    return "Every row is read once, and the ranks read contiguous ranges whose sizes differ by at most one row."


def _file_ranges(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    total, start, ranges = sum(lengths), 0, []
    first, last = total * rank // size, total * (rank + 1) // size  # this rank's rows of the concatenated files
    for file, length in enumerate(lengths):
        begin, end = max(first - start, 0), min(last - start, length)
        if begin < end:
            ranges.append((file, begin, end))
        start += length
    return ranges


def _whole_files(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    return [(file, 0, length) for file, length in enumerate(lengths) if length and file % size == rank]


def _part_of_each_file(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    ranges = [(file, n * rank // size, n * (rank + 1) // size) for file, n in enumerate(lengths)]
    return [(file, begin, end) for file, begin, end in ranges if begin < end]


def _drops_the_remainder(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    each = sum(lengths) // size
    return _between(lengths, rank * each, (rank + 1) * each)


def _rest_to_the_last(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    each = sum(lengths) // size
    return _between(lengths, rank * each, sum(lengths) if rank == size - 1 else (rank + 1) * each)


def _rounds_up(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    each = -(-sum(lengths) // size)
    return _between(lengths, rank * each, (rank + 1) * each)


def _with_empty_ranges(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    total, start, ranges = sum(lengths), 0, []
    first, last = total * rank // size, total * (rank + 1) // size
    for file, length in enumerate(lengths):
        begin = min(max(first - start, 0), length)
        ranges.append((file, begin, min(max(last - start, begin), length)))
        start += length
    return ranges


def _inclusive_ends(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    return [(file, begin, end - 1) for file, begin, end in _file_ranges(lengths, rank, size)]


def _global_rows(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    starts = [0, *accumulate(lengths)]
    return [(file, starts[file] + begin, starts[file] + end) for file, begin, end in _file_ranges(lengths, rank, size)]


def _row_by_row(lengths: Sequence[int], rank: int, size: int) -> list[Range]:
    return [(file, n, n + 1) for file, begin, end in _file_ranges(lengths, rank, size) for n in range(begin, end)]


def _between(lengths: Sequence[int], first: int, last: int) -> list[Range]:
    starts = [0, *accumulate(lengths)]
    ranges = [(file, max(first - starts[file], 0), min(last - starts[file], n)) for file, n in enumerate(lengths)]
    return [(file, begin, end) for file, begin, end in ranges if begin < end]


file_ranges = Exercise(
    task=(
        "file_ranges(lengths, rank, size): return this rank's rows as a list of (file, begin, end). Each rank reads "
        "one contiguous range of the concatenated files, and the ranks' row counts differ by at most one."
    ),
    test=_test_ranges,
    solution=_file_ranges,
    wrong={
        "gives each rank whole files": _whole_files,
        "splits each file between all ranks": _part_of_each_file,
        "drops the remainder": _drops_the_remainder,
        "gives the remainder to the last rank": _rest_to_the_last,
        "rounds the size of each piece up": _rounds_up,
        "returns empty ranges": _with_empty_ranges,
        "excludes the last row of each range": _inclusive_ends,
        "returns rows of the concatenated files": _global_rows,
        "returns one range per row": _row_by_row,
    },
    hints=(
        "Which rows of the concatenated files belong to this rank? Rank r begins where rank r - 1 ends.",
        "With first = total * rank // size and last = total * (rank + 1) // size, the ranks' row counts differ "
        "by at most one.",
        "A file that starts at row `start` contributes rows max(first - start, 0) to min(last - start, length).",
    ),
)
