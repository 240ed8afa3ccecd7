//! The C library's functions that the service needs and Rust's library does not offer.
//!
//! Owns: nothing. Threads: any. Does not: decide anything.
// UNSAFETY: calls into the C library; each block says what bounds its arguments.
#![expect(unsafe_code, reason = "calls into the C library")]

use core::ffi::c_int;
use core::mem::MaybeUninit;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The user as whom this process acts.
pub(super) fn own_uid() -> u32 {
    // SAFETY: always succeeds, takes nothing.
    unsafe { libc::geteuid() }
}

/// The user who connected, as the system noted it then.
pub(super) fn peer_uid(stream: &UnixStream) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut size = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the descriptor is open while it is borrowed; the address and the size are those of a local value.
    let status = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut size)
    };
    (status == 0).then_some(peer.uid)
}

/// Sends what the system takes at once. Never waits, and raises no signal if nobody reads any more: the host may not ignore it.
pub(super) fn send(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the descriptor is open while it is borrowed; the bytes are readable for their length.
    let sent = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Waits until one of them can be read, or so many milliseconds; for ever without a number. Returns early for any reason.
pub(super) fn wait(sources: &[&dyn AsRawFd], timeout_ms: Option<u64>) {
    let source = |source: &&dyn AsRawFd| libc::pollfd { fd: source.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut list: Vec<libc::pollfd> = sources.iter().map(source).collect();
    let timeout = timeout_ms.map_or(-1, |ms| c_int::try_from(ms).unwrap_or(c_int::MAX));
    let Ok(count) = libc::nfds_t::try_from(list.len()) else { return };
    // SAFETY: the list holds as many entries as are named; the descriptors are open while they are borrowed.
    unsafe { libc::poll(list.as_mut_ptr(), count, timeout) };
}

/// Calls `start` while all signals are blocked for this thread, so that a thread that it starts gets none of the host's.
pub(super) fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is a local value, which the call fills.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: both sets are local values; the first is filled.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) } == 0;
    let result = start();
    if blocked {
        // SAFETY: the call above wrote the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
    }
    result
}

/// Has a function called when the process exits, before what was registered or constructed earlier is taken down.
pub(super) fn at_exit(function: extern "C" fn()) -> bool {
    // SAFETY: the function stays mapped: the library is never unloaded.
    unsafe { libc::atexit(function) == 0 }
}

/// Whether there is a process of this number.
pub(super) fn is_alive(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return false };
    // SAFETY: signal 0 is never sent; only whether it could be is asked.
    let status = unsafe { libc::kill(pid, 0) };
    status == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}
