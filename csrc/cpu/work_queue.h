// Dynamic scheduling: a thread that has finished a task takes the next. Included inside a file's own namespace.

// Tasks 0 to end - 1, each taken by one thread. If all threads had equal static shares, they would wait for any thread
// whose CPU also runs other work. This wait would cost 10 to 15% of the time (medians, README.md).
struct WorkQueue {
    std::int64_t end;
    std::int64_t next = 0;

    template <class Body>
    void for_each(Body body) {
        for (std::int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < end;) body(i);
    }
};

// Runs job.pack_x(panel) for all panels, and then job.run(queue) on each thread. `run` computes blocks from the queue
// until it is empty, or returns false if it gets no memory. `panel_grain` panels, or `block_grain`
// blocks, are enough work for one more thread.
template <class Job>
Status pack_and_run(ParallelFor parallel_for, const Job& job, std::int64_t panels, std::int64_t panel_grain,
                    std::int64_t blocks, std::int64_t block_grain) {
    WorkQueue panel_queue{panels}, block_queue{blocks};
    bool out_of_memory = false;
    const auto pack = [&](std::int64_t, std::int64_t) {
        panel_queue.for_each([&](std::int64_t panel) { job.pack_x(panel); });
    };
    const auto run = [&](std::int64_t, std::int64_t) {
        if (!job.run(block_queue)) __atomic_store_n(&out_of_memory, true, __ATOMIC_RELAXED);
    };
    Status status = over_ranges(parallel_for, panels, panel_grain, pack);
    if (status == Status::ok) status = over_ranges(parallel_for, blocks, block_grain, run);
    return status == Status::ok && out_of_memory ? Status::out_of_memory : status;
}
