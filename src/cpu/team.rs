//! The threads, and the jobs that they are given.
//!
//! Owns: threads named `ggml-moe-cpu-N`, joined when the team is dropped; a few places for jobs; how many of the threads work ([`use_threads`]), the
//! others sleep.
//! Invariants: a place has one owner, its [`Ticket`], from taking it until the ticket is gone; what the job points to is used only while
//! the ticket lives. A panic in a task is caught, ends the job, and is told by the ticket.
//! Threads: any thread may start jobs, several at once. The team's threads serve the places in turn; whoever waits for a job helps with it.
//! Does not: read settings, log, or know what the host is.
// UNSAFETY: tasks run on memory that the caller of `start` vouches for; places are shared as `handover` orders it.
#![expect(unsafe_code, reason = "tasks run on memory that the caller of `start` vouches for")]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::handover::{Bell, Tasks};
use super::shape::{Job, JobError};
use super::threads;
use super::work::Work;

/// Jobs at once; each backend has at most one.
const PLACES: usize = 8;

/// How a team is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Threads of its own; callers that wait come on top.
    pub(crate) threads: usize,
    /// Whether each thread is bound to a processor of its own.
    pub(crate) pin: bool,
    /// How long a thread without work stays awake for the next job, in microseconds.
    pub(crate) spin_us: u32,
}

/// Threads that compute experts in RAM.
pub(crate) struct Team {
    shared: Arc<Shared>,
    options: Options,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    places: [Place; PLACES],
    bell: Bell,
    /// Threads that work, and the bell for the others.
    working: AtomicUsize,
    spare: Bell,
    spin: Duration,
}

/// A job's place, on cache lines of its own.
#[repr(align(128))]
struct Place {
    taken: AtomicBool,
    tasks: Tasks,
    work: SharedWork,
}

/// A job that threads share.
struct SharedWork(UnsafeCell<Work>);

// SAFETY: the data is written by the owner of the place alone, while no task of it can be taken; other threads read it between taking a
// task and finishing it (`handover::Tasks`). The addresses in it are used as the contract of `Team::start` allows, from any thread.
unsafe impl Sync for SharedWork {}
// SAFETY: as above; a team may be moved to another thread.
unsafe impl Send for SharedWork {}

/// A job that was started. Waiting for it helps with it; dropping it waits, too.
pub(crate) struct Ticket<'a> {
    team: &'a Team,
    place: &'a Place,
}

impl Team {
    /// Starts the threads. Err says why the system gives none.
    pub(crate) fn new(options: Options) -> std::io::Result<Self> {
        let places = core::array::from_fn(|_| Place {
            taken: AtomicBool::new(false),
            tasks: Tasks::new(),
            work: SharedWork(UnsafeCell::new(Work::default())),
        });
        let spin = Duration::from_micros(options.spin_us.into());
        let working = AtomicUsize::new(options.threads);
        let shared = Arc::new(Shared { places, bell: Bell::new(), working, spare: Bell::new(), spin });
        let team = Self { shared, options, threads: Mutex::new(Vec::new()) };
        team.grow(options.threads)?; // the threads so far are joined if one cannot be made
        Ok(team)
    }

    /// Makes threads until there are so many.
    fn grow(&self, count: usize) -> std::io::Result<()> {
        let mut handles = self.threads.lock();
        let processors = if self.options.pin { threads::processors() } else { Vec::new() };
        for index in handles.len()..count {
            let shared = Arc::clone(&self.shared);
            let processor = (!processors.is_empty()).then(|| processors[index % processors.len()]);
            let builder = std::thread::Builder::new().name(format!("ggml-moe-cpu-{index}"));
            handles.push(builder.spawn(move || {
                processor.into_iter().for_each(threads::pin_to);
                shared.serve(index);
            })?);
        }
        Ok(())
    }

    /// Threads of its own that work.
    pub(crate) fn threads(&self) -> usize {
        self.shared.working.load(Ordering::Relaxed)
    }

    /// From the next job on so many threads work, made if need be. With fewer than there are the others sleep. Where the system gives no more,
    /// those that there are work.
    pub(crate) fn use_threads(&self, count: usize) {
        if count == self.threads() {
            return;
        }
        let _ = self.grow(count); // it works with what there is
        let count = count.clamp(1, self.threads.lock().len().max(1));
        let before = self.shared.working.swap(count, Ordering::Relaxed);
        if count > before {
            self.shared.spare.ring();
        }
    }

    /// Starts a job and returns at once.
    ///
    /// # Safety
    /// Until the ticket has been waited for or dropped: inputs, outputs and tables are valid and aligned for `f32`, and have the rows that
    /// the job and its shape name; each matrix of a group is valid for its rows of the shape's stride, each holding values of its type;
    /// nobody writes to what is read, or touches the outputs; no two pairs have the same output. The ticket is not leaked.
    pub(crate) unsafe fn start(&self, job: &Job<'_>) -> Result<Ticket<'_>, JobError> {
        // SAFETY: the same contract.
        unsafe { self.start_with(job, |_| ()) }
    }

    unsafe fn start_with(&self, job: &Job<'_>, adjust: impl FnOnce(&mut Work)) -> Result<Ticket<'_>, JobError> {
        let free =
            |place: &&Place| place.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let place = self.shared.places.iter().find(free).ok_or(JobError::Busy)?;
        // From here on the ticket gives the place back, whatever happens.
        let ticket = Ticket { team: self, place };
        // SAFETY: the place is ours and its last job has ended, so nobody else can take a task and look at the data.
        let work = unsafe { &mut *place.work.0.get() };
        // The caller helps, so there is one thread more than the team has.
        let count = work.prepare(job, self.threads() + 1)?;
        adjust(work);
        if let Some(count) = i32::try_from(count).ok().filter(|&count| count > 0) {
            place.tasks.publish(count);
            self.shared.bell.ring();
        }
        Ok(ticket)
    }
}

static TEAM: Mutex<Weak<Team>> = Mutex::new(Weak::new());

/// The team of this process: the one that is there, or a new one. It lives as long as anybody holds it, and whoever comes later shares it
/// as it is, whatever the options.
pub(crate) fn shared(options: Options) -> std::io::Result<Arc<Team>> {
    let mut team = TEAM.lock();
    if let Some(team) = team.upgrade() {
        return Ok(team);
    }
    let made = Arc::new(Team::new(options)?);
    *team = Arc::downgrade(&made);
    Ok(made)
}

/// As [`Team::use_threads`], for the team of this process, if there is one.
pub(crate) fn use_threads(count: usize) {
    if let Some(team) = TEAM.lock().upgrade() {
        team.use_threads(count);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.bell.close();
        self.shared.spare.close();
        for thread in self.threads.get_mut().drain(..) {
            // A thread of the team catches what its tasks raise; there is nothing to tell here.
            let _ = thread.join();
        }
    }
}

impl Ticket<'_> {
    /// Whether all is computed. Never waits.
    #[cfg(test)]
    pub(crate) fn is_done(&self) -> bool {
        self.place.tasks.is_done()
    }

    /// Helps until nothing is left to take, then waits for the others.
    pub(crate) fn wait(self) -> Result<(), JobError> {
        self.finish();
        // Failed or not, it is over; the flag stays until the next job of this place.
        if self.place.tasks.has_failed() { Err(JobError::Failed) } else { Ok(()) }
    }

    fn finish(&self) {
        self.place.work_off();
        // Who waits here has nothing else to do, but leaves the processor to others if it takes long.
        self.place.tasks.wait(self.team.shared.spin);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.finish();
        self.place.taken.store(false, Ordering::Release);
    }
}

impl Shared {
    /// The life of a thread of the team.
    fn serve(&self, index: usize) {
        let mut turn = 0;
        loop {
            let spare = self.spare.count();
            if index >= self.working.load(Ordering::Relaxed) {
                if !self.spare.wait(spare, Duration::ZERO) {
                    return;
                }
                continue;
            }
            let seen = self.bell.count();
            // The places in turn, beginning behind the one that was served last.
            let next = (0..PLACES).map(|step| (turn + step) % PLACES).find(|&place| self.places[place].tasks.any());
            if let Some(place) = next {
                self.places[place].work_off();
                turn = place + 1;
            } else if !self.bell.wait(seen, self.spin) {
                return;
            }
        }
    }
}

impl Place {
    /// Does tasks until there is none left to take.
    fn work_off(&self) {
        let mut count = 0;
        while let Some(number) = self.tasks.take() {
            count += 1;
            if !self.tasks.has_failed() {
                // SAFETY: a task was taken, so the data is that of its job and is only read until the task is finished.
                let work = unsafe { &*self.work.0.get() };
                // SAFETY: as above; the job's addresses are valid by the contract of `start`.
                let run = AssertUnwindSafe(|| unsafe { work.run(number, &self.tasks) });
                if catch_unwind(run).is_err() {
                    self.tasks.fail();
                }
            }
        }
        if count > 0 {
            self.tasks.finish(count);
        }
    }
}

#[cfg(test)]
#[path = "team_tests.rs"]
mod tests;
