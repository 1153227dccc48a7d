// Work shared out by what is left of it. Included inside a file's own namespace.

// Items that threads take one after the other. Equal shares are not done at the same time where a thread's CPU is slowed
// down by what else runs on its machine.
struct WorkQueue {
    std::int64_t end;
    std::int64_t next = 0;

    template <class Body>
    void take(Body body) {
        for (std::int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < end;) body(i);
    }
};

// A job's pack(panel) for all panels, and then its run(turns), which takes all blocks. A grain is how many of them are worth
// a thread.
template <class Job>
Status pack_and_run(ParallelFor parallel_for, const Job& job, std::int64_t panels, std::int64_t grain_of_panels,
                    std::int64_t blocks, std::int64_t grain_of_blocks) {
    struct Work {
        const Job& job;
        WorkQueue panels, blocks;
    } work{job, {panels}, {blocks}};
    const auto pack = [](std::int64_t, std::int64_t, void* context) {
        auto& work = *static_cast<Work*>(context);
        work.panels.take([&](std::int64_t panel) { work.job.pack(panel); });
    };
    const auto run = [](std::int64_t, std::int64_t, void* context) {
        auto& work = *static_cast<Work*>(context);
        work.job.run(work.blocks);
    };
    const bool failed = parallel_for(0, panels, grain_of_panels, pack, &work) ||
                        parallel_for(0, blocks, grain_of_blocks, run, &work);
    return failed ? Status::parallel_for_failed : Status::ok;
}
