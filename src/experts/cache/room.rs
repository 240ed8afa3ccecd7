//! The memory of a new cache: how much each pool begins with.
//!
//! Owns: the division of the room that there is among the pools, and their first size. Invariants: each pool can hold at least one block.
//! Threads: whoever makes a cache. Does not: know why there is so much room (`device` does), or change sizes later (`resize` does).

use super::arena::{self, Matrix, PoolMemory};
use super::{NoCache, pools};
use crate::buffer::BufferError;
use crate::config::{AllocationKind, CacheSize};
use crate::device::{CacheRoom, Device};
use crate::experts::shape::{Group, Shape};
use crate::gpu::DriverError;
use crate::memory::{Lease, Use};

/// Several pools for a kind of blocks of which kernels cannot find all that could be held in one. Returns the matrices of each pool.
pub(super) fn split(device: &Device, groups: &mut [Group], kinds: Vec<Vec<Matrix>>, bytes: usize) -> Vec<Vec<Matrix>> {
    let largest = device.inner_buffer_type.max_size();
    let experts = |number: usize| {
        groups.iter().filter(|group| usize::from(group.pool) == number).map(|group| group.experts).sum::<u32>()
    };
    let whole: Vec<usize> = kinds
        .iter()
        .enumerate()
        .map(|(number, kind)| experts(number) as usize * PoolMemory::block_bytes(kind))
        .collect();
    let kind = |(kind, bytes): (&Vec<Matrix>, usize)| pools::Kind {
        wanted: u32::try_from(bytes / PoolMemory::block_bytes(kind).max(1)).unwrap_or(u32::MAX),
        most: kind.iter().map(|matrix| matrix.most_slots(largest)).min().unwrap_or(0),
    };
    let limits: Vec<pools::Kind> = kinds.iter().zip(pools::divide(bytes, &whole)).map(kind).collect();
    pools::split(groups, &limits).into_iter().map(|kind| kinds[kind].clone()).collect()
}

/// Divides the memory among the pools by what all their blocks would take.
pub(super) fn pools(
    device: &Device,
    shape: &Shape,
    kinds: &[Vec<Matrix>],
    room: CacheRoom,
) -> Result<(Vec<PoolMemory>, Lease), NoCache> {
    let no_memory = || NoCache::NoMemory(device.inner_name.clone());
    let lease = device.account().lease(Use::Arena, 0, None).ok_or_else(no_memory)?;
    let largest = device.inner_buffer_type.max_size();
    let all = |pool: usize| -> usize {
        shape.groups().iter().filter(|group| usize::from(group.pool) == pool).map(|group| group.experts as usize).sum()
    };
    let weight = |pool: usize| match device.cache_size() {
        CacheSize::SlotsPerLayer(slots) => {
            let of_pool = shape.groups().iter().filter(|group| usize::from(group.pool) == pool);
            of_pool.map(|group| slots.min(group.experts) as usize).sum::<usize>()
        }
        CacheSize::Auto | CacheSize::Off | CacheSize::Mib(_) => all(pool),
    };
    let whole: Vec<usize> =
        kinds.iter().enumerate().map(|(pool, kind)| weight(pool) * PoolMemory::block_bytes(kind)).collect();
    let (mut start, mut raised) = (room.start, false);
    loop {
        match allocate(device, kinds, &whole, largest, CacheRoom { start, ..room }) {
            Ok(pools) => {
                lease.resize(pools.iter().map(PoolMemory::bytes).sum());
                return Ok((pools, lease));
            }
            Err(Some(DriverError::OutOfMemory)) if start > 0 => (start, raised) = (start / 10 * 9, true),
            Err(None) if !raised => (start, raised) = (room.may, true), // the part to start with holds no block
            Err(Some(DriverError::OutOfMemory)) => return Err(NoCache::NoRoom),
            // With more memory there will be room, unless this is all that it shall ever have.
            Err(None) if room.may < room.most => return Err(NoCache::NoRoom),
            Err(None) => return Err(no_memory()),
            Err(Some(error)) => return Err(BufferError::from(error).into()),
        }
    }
}

/// The pools, with what there is to start with; `Err(None)` if that is not enough for a block.
fn allocate(
    device: &Device,
    kinds: &[Vec<Matrix>],
    whole: &[usize],
    largest: usize,
    room: CacheRoom,
) -> Result<Vec<PoolMemory>, Option<DriverError>> {
    let driver = device.driver();
    let zeros: Vec<usize> =
        kinds.iter().map(|kind| arena::ZERO_SLOTS as usize * PoolMemory::block_bytes(kind)).collect();
    let [starts, mosts, limits] = [room.start, room.most, room.limit].map(|bytes| pools::parts(bytes, whole, &zeros));
    let mut out = Vec::with_capacity(kinds.len());
    for (number, kind) in kinds.iter().enumerate() {
        if device.allocation_fails(AllocationKind::Device) {
            return Err(Some(DriverError::OutOfMemory));
        }
        let (start, most) = (starts[number], mosts[number]);
        let block = PoolMemory::block_bytes(kind).max(1);
        let bound = kind.iter().map(|matrix| matrix.most_slots(largest) as usize).min().unwrap_or(0);
        let slots = |bytes: usize| {
            let slots =
                (bytes / block).saturating_sub(arena::ZERO_SLOTS as usize).min(bound).min(whole[number] / block);
            u32::try_from(slots).unwrap_or(u32::MAX)
        };
        let (least, all) = (slots(start), slots(most.max(start)));
        if least == 0 {
            return Err(None);
        }
        let mut pool = PoolMemory::reserve(driver, kind, all, least, device.may_resize())?;
        // A number of slots is a number of slots; a size is a size.
        let counted = matches!(device.cache_size(), CacheSize::SlotsPerLayer(_));
        let fits = if counted { Some(least) } else { pool.slots_for(start).filter(|slots| *slots > 0) };
        // A size that is smaller than the pieces of a driver's memory is rounded up to them, if there is room.
        let rounded = || Some(least).filter(|slots| pool.bytes_for(*slots) <= limits[number]);
        let open = if pool.is_elastic() { fits.or_else(rounded).ok_or(None)? } else { least };
        pool.open(driver, open)?;
        out.push(pool);
    }
    driver.synchronize()?;
    Ok(out)
}
