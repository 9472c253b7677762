"""A queue beside a buffer's own sampler, with its place in the table's directory."""

from ding_store.buffer import Fifo, StoreBuffer


def persistent_queue(buffer: StoreBuffer) -> StoreBuffer:
    """
    Return a view with a queue whose place survives the process. A buffer does so for its own sampler alone. Tests that
    damage files or kill processes have both, so that each run reaches all files.
    """
    queue = Fifo()
    view = buffer.view(queue)
    assert buffer.table.table_dir is not None
    queue.persist_to(buffer.table.table_dir)
    return view
