//! A model of the thread team: src/cpu/handover.rs as it is, over loom's atomics, locks and threads. Loom runs each case in every order
//! of steps that the memory model allows (within a number of preemptions that run.sh sets) and reports data races, deadlocks and
//! assertions that fail.
#![cfg(all(loom, test))]

#[path = "../../../src/cpu/handover.rs"]
mod handover;
mod sync;

use handover::{Bell, Latch, Tasks};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;

/// A place for jobs: what is published, and the data that only tasks may look at. Loom watches the cell.
struct Place {
    tasks: Tasks,
    bell: Bell,
    job: UnsafeCell<usize>,
    /// How often each task of each job was done.
    done: [AtomicUsize; 4],
}

impl Place {
    fn new() -> Arc<Self> {
        let done = std::array::from_fn(|_| AtomicUsize::new(0));
        Arc::new(Self { tasks: Tasks::new(), bell: Bell::new(), job: UnsafeCell::new(usize::MAX), done })
    }

    fn work_off(&self) {
        let mut count = 0;
        while let Some(task) = self.tasks.take() {
            count += 1;
            // SAFETY: a task was taken; whether that suffices is what loom finds out.
            let job = self.job.with(|job| unsafe { *job });
            self.done[job + task].fetch_add(1, Ordering::Relaxed);
        }
        if count > 0 {
            self.tasks.finish(count);
        }
    }

    /// As `Shared::serve` of the team, with one place.
    fn serve(&self) {
        loop {
            let seen = self.bell.count();
            if self.tasks.any() {
                self.work_off();
            } else if !self.bell.wait(seen, NOW) {
                return;
            }
        }
    }

    /// As `Team::start`.
    fn start(&self, job: usize, count: i32) {
        // SAFETY: the last job has ended; whether that suffices is what loom finds out.
        self.job.with_mut(|place| unsafe { *place = job });
        self.tasks.publish(count);
        self.bell.ring();
    }

    fn end(&self, helps: bool) {
        if helps {
            self.work_off();
        }
        self.tasks.wait(NOW);
    }
}

/// Jobs of one or two tasks, one after the other in the same place.
fn jobs(workers: usize, helps: bool, counts: &'static [i32]) {
    let mut model = loom::model::Builder::new();
    if workers > 1 {
        model.preemption_bound = Some(1); // more takes minutes
    }
    model.check(move || {
        let place = Place::new();
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let place = Arc::clone(&place);
                thread::spawn(move || place.serve())
            })
            .collect();
        for (job, &count) in (0..).step_by(2).zip(counts) {
            place.start(job, count);
            place.end(helps);
            for task in 0..usize::try_from(count).unwrap() {
                assert_eq!(place.done[job + task].load(Ordering::Relaxed), 1);
            }
        }
        place.bell.close();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A worker that comes late finds the next job or nothing, never the data of a job that is being made.
#[test]
fn a_caller_that_helps_reuses_its_place() {
    jobs(1, true, &[1, 2]);
}

/// A sleeping worker is woken by each job, and by the end.
#[test]
fn a_caller_that_only_waits_is_served() {
    jobs(1, false, &[2, 1]);
}

/// Both are woken, both may take a task, both end.
#[test]
fn two_workers() {
    jobs(2, false, &[2]);
}

/// What was written before arriving is seen behind the latch; the last one to arrive sees all.
#[test]
fn latches_order_what_tasks_write() {
    loom::model(|| {
        let shared =
            Arc::new((Tasks::new(), Latch::new(), [UnsafeCell::new(0), UnsafeCell::new(0)], UnsafeCell::new(0)));
        shared.1.close(2);
        shared.0.publish(3);
        let run = |shared: &(Tasks, Latch, [UnsafeCell<usize>; 2], UnsafeCell<usize>)| {
            let (tasks, latch, rows, result) = shared;
            while let Some(task) = tasks.take() {
                match task {
                    2 => {
                        assert!(latch.wait(tasks));
                        // SAFETY: the latch is open.
                        let sum: usize = rows.iter().map(|row| row.with(|row| unsafe { *row })).sum();
                        // SAFETY: the only task that writes it.
                        result.with_mut(|result| unsafe { *result = sum });
                    }
                    half => {
                        // SAFETY: this task's row.
                        rows[half].with_mut(|row| unsafe { *row = half + 1 });
                        if latch.arrive() {
                            // SAFETY: both have arrived.
                            rows.iter().for_each(|row| row.with(|row| assert_ne!(unsafe { *row }, 0)));
                        }
                    }
                }
                tasks.finish(1);
            }
        };
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || run(&other));
        run(&shared);
        shared.0.wait(NOW);
        // SAFETY: all tasks are done.
        assert_eq!(shared.3.with(|result| unsafe { *result }), 3);
        thread.join().unwrap();
    });
}

/// A task that fails lets those go that wait for it.
#[test]
fn a_failure_ends_the_wait() {
    loom::model(|| {
        let shared = Arc::new((Tasks::new(), Latch::new()));
        shared.1.close(1);
        shared.0.publish(2);
        let run = |(tasks, latch): &(Tasks, Latch)| {
            while let Some(task) = tasks.take() {
                if task == 0 {
                    tasks.fail();
                } else {
                    assert!(!latch.wait(tasks));
                }
                tasks.finish(1);
            }
        };
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || run(&other));
        run(&shared);
        shared.0.wait(NOW);
        assert!(shared.0.has_failed());
        thread.join().unwrap();
    });
}
