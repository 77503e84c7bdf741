from extractor.protocol.api import MAX_CELLS
from extractor.supervisor.board import DONE, FAILED, PENDING, RUNNING, ShardBoard


def test_cells_follow_their_shards():
    board = ShardBoard(5, done=[0, 3])
    board.set(1, RUNNING)
    board.set(2, FAILED)

    assert board.as_map().cells == "drxd."
    assert board.as_map().shards_per_cell == 1
    assert (board.count(DONE), board.count(PENDING)) == (2, 1)

    board.set(1, DONE)
    assert board.as_map().cells == "ddxd."


def test_a_cell_of_many_shards_shows_the_worst_of_them():
    board = ShardBoard(2 * MAX_CELLS + 1, done=range(2 * MAX_CELLS))
    board.set(5, FAILED)
    board.set(9, RUNNING)

    found = board.as_map()

    assert found.shards_per_cell == 3
    assert len(found.cells) <= MAX_CELLS
    assert found.cells[:5] == "dxdrd"
    assert found.cells[-1] == "."


def test_a_plan_without_shards_has_no_cells():
    assert ShardBoard(0, done=[]).as_map().cells == ""
