//! Tagged handles: how a context pointer that the host carries becomes a reference to our object.
//!
//! Owns: the tag discipline and the one place where a context pointer is dereferenced.
//! Invariants: a handle starts with the tag of its kind; null, misaligned or differently tagged pointers are refused. A handle that
//! was freed is refused as long as its memory was not used again.
//! Threads: any; the objects behind handles are `Sync`.

use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;

/// A kind of object that the host holds by pointer.
pub(crate) trait Kind: Sync {
    /// Distinct per kind; printed when a check fails.
    const TAG: u64;
    /// Upstream's word for it.
    const NAME: &'static str;
}

/// The tag of a handle that was freed.
const DEAD: u64 = 0xdead_dead_dead_dead;

/// What a context pointer points to.
#[repr(C)]
struct Handle<T> {
    tag: u64,
    value: T,
}

/// A context pointer that is not one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) struct NotOurs {
    kind: &'static str,
    why: &'static str,
}

impl fmt::Display for NotOurs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the host passed something else than our {} ({})", self.kind, self.why)
    }
}

/// Boxes a value behind its tag; [`free`] takes it back.
pub(crate) fn new<T: Kind>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Handle { tag: T::TAG, value })).cast()
}

/// Checks a context pointer and lends the object.
///
/// # Safety
/// `context` is null or readable for 8 bytes, and if it came from [`new`] it was not freed and is not freed during `'a`.
pub(crate) unsafe fn get<'a, T: Kind>(context: *mut c_void) -> Result<&'a T, NotOurs> {
    let handle = check::<T>(context)?;
    // SAFETY: aligned and not null (checked), readable by the caller's contract.
    let tag = unsafe { handle.cast::<u64>().read() };
    if tag != T::TAG {
        return Err(NotOurs { kind: T::NAME, why: if tag == DEAD { "it was freed" } else { "wrong tag" } });
    }
    // SAFETY: the tag says that `new::<T>` made it; the caller says that it lives.
    Ok(unsafe { &(*handle.as_ptr()).value })
}

/// Takes an object back from its context pointer.
///
/// # Safety
/// As for [`get`], and nobody else uses the handle any more.
pub(crate) unsafe fn free<T: Kind>(context: *mut c_void) -> Result<T, NotOurs> {
    // SAFETY: the caller's contract is that of `get`.
    unsafe { get::<T>(context) }?;
    let handle = check::<T>(context)?;
    // SAFETY: `get` proved that `new::<T>` made it; the caller gives up the only use.
    let mut handle = unsafe { Box::from_raw(handle.as_ptr()) };
    let tag: *mut u64 = &raw mut handle.tag;
    // SAFETY: a field of the box. Volatile, or the write to memory that is about to be freed would be dropped.
    unsafe { tag.write_volatile(DEAD) };
    Ok(handle.value)
}

fn check<T: Kind>(context: *mut c_void) -> Result<NonNull<Handle<T>>, NotOurs> {
    let handle = NonNull::new(context.cast::<Handle<T>>()).ok_or(NotOurs { kind: T::NAME, why: "null" })?;
    if !handle.is_aligned() {
        return Err(NotOurs { kind: T::NAME, why: "misaligned" });
    }
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct A(u32);
    #[derive(Debug)]
    struct B;
    impl Kind for A {
        const TAG: u64 = 1;
        const NAME: &'static str = "a";
    }
    impl Kind for B {
        const TAG: u64 = 2;
        const NAME: &'static str = "b";
    }

    #[test]
    fn checked_both_ways() {
        let a = new(A(7));
        // SAFETY: made by `new` above and alive.
        assert_eq!(unsafe { get::<A>(a) }.unwrap().0, 7);
        // SAFETY: as above; the tag differs.
        let wrong = unsafe { get::<B>(a) }.unwrap_err();
        assert_eq!(wrong.to_string(), "the host passed something else than our b (wrong tag)");
        // SAFETY: null is allowed.
        assert_eq!(unsafe { get::<A>(core::ptr::null_mut()) }.unwrap_err().why, "null");
        // SAFETY: refused before it is read.
        assert_eq!(unsafe { get::<A>(a.wrapping_byte_add(1)) }.unwrap_err().why, "misaligned");
        // SAFETY: the only use.
        assert_eq!(unsafe { free::<A>(a) }.unwrap().0, 7);
    }
}
