//! One suite for every driver: what the contract promises, tried through the contract.

use super::{Driver, Elastic, ListedCopy, Memory, Place, Rows, elastic_size};
use crate::experts::HostMemory;

fn read(driver: &dyn Driver, memory: &dyn Memory, offset: usize, bytes: usize) -> Vec<u8> {
    let mut out = vec![0xee_u8; bytes];
    let source = Place { memory, address: memory.base() + offset };
    // SAFETY: the vector outlives the `synchronize` below.
    unsafe { driver.download(out.as_mut_ptr().cast(), source, Rows::one(bytes)) }.unwrap();
    driver.synchronize().unwrap();
    out
}

fn write(driver: &dyn Driver, memory: &dyn Memory, offset: usize, bytes: &[u8]) {
    let target = Place { memory, address: memory.base() + offset };
    // SAFETY: the slice outlives the `synchronize` below.
    unsafe { driver.upload(target, bytes.as_ptr().cast(), Rows::one(bytes.len())) }.unwrap();
    driver.synchronize().unwrap();
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|index| u8::try_from((index * 31 + index / 251 + seed) % 256).unwrap()).collect()
}

/// Sizes below, at and above the units that drivers map memory in.
const SIZES: [usize; 5] = [1, 4096, (2 << 20) - 1, (2 << 20) + 3, (64 << 20) + 5];

/// Memory of every size holds what was written, at both ends and across mapped units.
pub(crate) fn round_trips(driver: &dyn Driver) {
    for bytes in SIZES {
        let memory = driver.allocate(bytes).unwrap();
        assert!(memory.bytes() >= bytes);
        assert!(memory.contains(memory.base(), bytes) && !memory.contains(memory.base(), memory.bytes() + 1));
        let data = pattern(bytes, 1);
        write(driver, &*memory, 0, &data);
        assert_eq!(read(driver, &*memory, 0, bytes), data, "{bytes} bytes");
        let last = bytes - 1;
        write(driver, &*memory, last, &[9]);
        assert_eq!(read(driver, &*memory, last, 1), [9]);
    }
}

/// Fills touch exactly their range, whatever its alignment.
pub(crate) fn fills(driver: &dyn Driver) {
    let memory = driver.allocate(8192).unwrap();
    for (offset, bytes) in [(0, 8192), (0, 1), (1, 15), (3, 16), (17, 4097), (8191, 1), (100, 0)] {
        let before = pattern(8192, offset);
        write(driver, &*memory, 0, &before);
        driver.fill(Place { memory: &*memory, address: memory.base() + offset }, 0x5a, bytes).unwrap();
        let mut expected = before;
        expected[offset..offset + bytes].fill(0x5a);
        assert_eq!(read(driver, &*memory, 0, 8192), expected, "{bytes} bytes at {offset}");
    }
}

/// Rows go where their strides say, and nothing between them is touched.
pub(crate) fn rows(driver: &dyn Driver) {
    let memory = driver.allocate(4096).unwrap();
    write(driver, &*memory, 0, &[0; 4096]);
    let data = pattern(512, 5);
    let rows = Rows { size: 10, count: 7, stride: 48, host_stride: 64 };
    let place = Place { memory: &*memory, address: memory.base() + 16 };
    // SAFETY: six strides of 64 and a row of 10 lie in 512 bytes, which live until `synchronize`.
    unsafe { driver.upload(place, data.as_ptr().cast(), rows) }.unwrap();
    driver.synchronize().unwrap();
    let mut expected = vec![0; 4096];
    for row in 0..7 {
        expected[16 + row * 48..][..10].copy_from_slice(&data[row * 64..][..10]);
    }
    assert_eq!(read(driver, &*memory, 0, 4096), expected);
    let mut back = vec![0xcc; 512];
    // SAFETY: as above.
    unsafe { driver.download(back.as_mut_ptr().cast(), place, rows) }.unwrap();
    driver.synchronize().unwrap();
    for (index, byte) in back.iter().enumerate() {
        let in_row = index % 64 < 10 && index / 64 < 7;
        assert_eq!(*byte, if in_row { data[index] } else { 0xcc }, "byte {index}");
    }
    // SAFETY: no rows, nothing is touched.
    unsafe { driver.upload(place, data.as_ptr().cast(), Rows { count: 0, ..rows }) }.unwrap();
}

/// Copies on the device, if the driver has them, move the bytes and only them.
pub(crate) fn copies(driver: &dyn Driver) {
    let bytes = (4 << 20) + 7;
    let (a, b) = (driver.allocate(bytes).unwrap(), driver.allocate(bytes).unwrap());
    let data = pattern(bytes, 3);
    write(driver, &*a, 0, &data);
    write(driver, &*b, 0, &vec![1; bytes]);
    let (from, to) = (Place { memory: &*a, address: a.base() + 1 }, Place { memory: &*b, address: b.base() + 2 });
    let done = driver.copy(to, from, bytes - 3).unwrap();
    let mut expected = vec![1; bytes];
    if done {
        expected[2..bytes - 1].copy_from_slice(&data[1..bytes - 2]);
    }
    assert_eq!(read(driver, &*b, 0, bytes), expected);
}

/// Lists of copies run behind what was asked for before and in front of what follows a mark, and touch nothing else.
pub(crate) fn lists(driver: &dyn Driver) {
    let (source, target) = (driver.allocate(4 << 20).unwrap(), driver.allocate(4 << 20).unwrap());
    let data = pattern(4 << 20, 9);
    let mut expected = vec![0x33; 4 << 20];
    driver.fill(Place { memory: &*target, address: target.base() }, 0x33, 4 << 20).unwrap();
    let from = Place { memory: &*source, address: source.base() };
    // SAFETY: the vector outlives the `synchronize` in `read`.
    unsafe { driver.upload(from, data.as_ptr().cast(), Rows::one(data.len())) }.unwrap();
    // More than one launch holds, of all lengths and alignments, an empty one included.
    let copies: Vec<(usize, usize, usize)> =
        (0..150).map(|number| (number * 20_000 + number % 17, number * 9_001, number * 131)).collect();
    let list: Vec<ListedCopy<'_>> = copies
        .iter()
        .map(|&(to, at, bytes)| ListedCopy {
            target: Place { memory: &*target, address: target.base() + to },
            source: Place { memory: &*source, address: source.base() + at },
            bytes,
        })
        .collect();
    let done = driver.copy_list(&list).unwrap();
    let beside = pattern(1000, 4);
    let free = Place { memory: &*target, address: target.base() + (3 << 20) + 500_000 };
    // SAFETY: as above; no range of the list lies there.
    unsafe { driver.upload(free, beside.as_ptr().cast(), Rows::one(1000)) }.unwrap();
    driver.mark().unwrap();
    // What was read may be written now.
    // SAFETY: as above.
    unsafe { driver.upload(from, beside.as_ptr().cast(), Rows::one(1000)) }.unwrap();
    expected[(3 << 20) + 500_000..][..1000].copy_from_slice(&beside);
    if done {
        for (to, at, bytes) in copies {
            expected[to..to + bytes].copy_from_slice(&data[at..at + bytes]);
        }
        assert!(read(driver, &*target, 0, 4 << 20) == expected);
    }
    assert!(driver.copy_list(&[]).unwrap());
    driver.synchronize().unwrap();
}

/// Times are those of the work between them: in order, and known once the work was waited for.
pub(crate) fn times(driver: &dyn Driver) {
    let memory = driver.allocate(8 << 20).unwrap();
    let place = Place { memory: &*memory, address: memory.base() };
    let mut clock = driver.clock().unwrap();
    assert_eq!(clock.read().unwrap(), Some(Vec::new()));
    for number in 0..4 {
        assert_eq!(clock.stamp().unwrap(), number);
        driver.fill(place, 1, 8 << 20).unwrap();
    }
    driver.synchronize().unwrap();
    let times = clock.read().unwrap().unwrap();
    assert!(times.len() == 4 && times[0] == 0.0 && times.is_sorted(), "{times:?}");
}

/// Taken bytes arrive whatever happens to their source, in order with everything else, also when there are many of them.
pub(crate) fn taken(driver: &dyn Driver) {
    let memory = driver.allocate(3 << 20).unwrap();
    let place = |offset: usize| Place { memory: &*memory, address: memory.base() + offset };
    let mut expected = vec![0_u8; 3 << 20];
    driver.fill(place(0), 0, 3 << 20).unwrap();
    for round in 0..40_usize {
        let mut source = pattern(70_000 + round, round);
        let offset = round * 70_001;
        // SAFETY: the source is readable.
        unsafe { driver.upload_taking(place(offset), source.as_ptr().cast(), Rows::one(source.len())) }.unwrap();
        expected[offset..offset + source.len()].copy_from_slice(&source);
        source.fill(0xdd);
    }
    let big = pattern(2 << 20, 77);
    // SAFETY: the source is readable.
    unsafe { driver.upload_taking(place(5), big.as_ptr().cast(), Rows::one(big.len())) }.unwrap();
    expected[5..5 + big.len()].copy_from_slice(&big);
    let rows = Rows { size: 3, count: 4, stride: 10, host_stride: 5 };
    // SAFETY: four rows lie in the source.
    unsafe { driver.upload_taking(place(0), big.as_ptr().cast(), rows) }.unwrap();
    for row in 0..4 {
        expected[row * 10..][..3].copy_from_slice(&big[row * 5..][..3]);
    }
    assert!(read(driver, &*memory, 0, 3 << 20) == expected);
}

/// Operations run in the order in which they were asked for.
pub(crate) fn order(driver: &dyn Driver) {
    let memory = driver.allocate(1 << 20).unwrap();
    let place = Place { memory: &*memory, address: memory.base() };
    let data = pattern(1 << 20, 11);
    driver.fill(place, 1, 1 << 20).unwrap();
    // SAFETY: the vector outlives the `synchronize` in `read`.
    unsafe { driver.upload(place, data.as_ptr().cast(), Rows::one(1 << 19)) }.unwrap();
    driver.fill(place, 3, 100).unwrap();
    let mut expected = vec![1; 1 << 20];
    expected[..1 << 19].copy_from_slice(&data[..1 << 19]);
    expected[..100].fill(3);
    assert_eq!(read(driver, &*memory, 0, 1 << 20), expected);
}

/// Too much memory is an error, and the driver works afterwards.
pub(crate) fn exhaustion(driver: &dyn Driver) {
    assert!(driver.allocate(1 << 50).is_err());
    round_trips(driver);
}

/// Sizes that an elastic memory of 40 MiB goes through, up and down, within and across its pieces.
const STEPS: [usize; 10] = [1, 5 << 20, (5 << 20) + 1, 0, 40 << 20, 33 << 20, (33 << 20) - 1, 4096, (17 << 20) + 5, 2];

/// Memory comes and goes at a constant address; what stays keeps its content, what comes can be used at once.
pub(crate) fn elastic(driver: &dyn Driver) {
    let mut memory = driver.reserve(40 << 20).unwrap();
    let (base, reserved) = (memory.base(), memory.reserved());
    assert!(memory.bytes() == 0 && reserved >= 40 << 20 && memory.unit() > 0);
    let data = pattern(40 << 20, 3);
    let mut known = 0;
    for bytes in STEPS {
        memory.resize(bytes).unwrap();
        let size = memory.bytes();
        assert_eq!(size, elastic_size(bytes, memory.unit(), reserved), "{bytes} bytes");
        assert!(memory.base() == base && memory.contains(base, bytes) && !memory.contains(base, size + 1));
        known = known.min(size);
        assert!(read(driver, &*memory, 0, known) == data[..known], "what stays, after {bytes} bytes");
        let end = size.min(data.len());
        write(driver, &*memory, known, &data[known..end]);
        known = end;
        assert!(read(driver, &*memory, 0, known) == data[..known], "what came, after {bytes} bytes");
    }
    assert!(memory.resize(reserved + 1).is_err());
    assert!(read(driver, &*memory, 0, known) == data[..known], "a refusal changes nothing");
}

/// Memory that goes is waited for: work on it was asked for before and may not be done yet. Work on what stays is done in order.
pub(crate) fn elastic_waits(driver: &dyn Driver) {
    let mut memory = driver.reserve(24 << 20).unwrap();
    let other = driver.allocate(1 << 20).unwrap();
    for round in 0..8_u8 {
        memory.resize(24 << 20).unwrap();
        let place = |memory: &dyn Elastic, offset: usize| memory.base() + offset;
        driver.fill(Place { address: place(&*memory, 0), memory: &*memory }, round, 24 << 20).unwrap();
        let last = Place { address: place(&*memory, 23 << 20), memory: &*memory };
        driver.copy(Place { memory: &*other, address: other.base() }, last, 1 << 20).unwrap();
        memory.resize(1 << 20).unwrap();
        assert_eq!(read(driver, &*memory, (1 << 20) - 1, 1), [round]);
    }
    driver.settle().unwrap();
}

/// Ranges that a sparse memory of 200 MiB is asked for and cut down to, in units: runs within and across the largest pieces.
#[expect(clippy::single_range_in_vec_init, reason = "one run of units is meant")]
const SPARSE_STEPS: [(bool, &[std::ops::Range<usize>]); 9] = [
    (false, &[3..5, 40..41, 96..100]),
    (true, &[0..60]),
    (false, &[4..5, 41..42, 97..98]),
    (true, &[10..11, 20..21, 41..99]),
    (false, &[10..11, 40..44, 50..51, 97..99]),
    (false, &[]),
    (true, &[0..100]),
    (false, &[0..1, 33..35, 63..66, 99..100]),
    (true, &[34..70]),
];

/// Memory comes and goes behind any part of constant addresses; what stays keeps its content, whatever goes around it.
pub(crate) fn sparse(driver: &dyn Driver) {
    const UNIT: usize = 2 << 20;
    let memory = driver.sparse(100 * UNIT).unwrap();
    let base = memory.base();
    assert!(
        memory.bytes() >= 100 * UNIT && memory.mapped_bytes() == memory.bytes() && UNIT.is_multiple_of(memory.unit())
    );
    let content = |unit: usize| vec![u8::try_from(unit + 1).unwrap(); 4096];
    let places = |unit: usize| [unit * UNIT, unit * UNIT + 1234, (unit + 1) * UNIT - 4096];
    let mut known: Vec<usize> = (0..100).collect();
    let set = |units: &[usize]| {
        for &unit in units {
            places(unit).into_iter().for_each(|offset| write(driver, &*memory, offset, &content(unit)));
        }
    };
    set(&known);
    for (number, (maps, ranges)) in SPARSE_STEPS.into_iter().enumerate() {
        let asked: Vec<usize> = ranges.iter().cloned().flatten().collect();
        let ranges = ranges.iter().map(|range| range.start * UNIT..range.end * UNIT).collect();
        if maps {
            memory.map(&ranges).unwrap();
            let came: Vec<usize> = asked.iter().copied().filter(|unit| !known.contains(unit)).collect();
            set(&came);
            known.extend(came);
        } else {
            // What was asked for before may not be done yet.
            if let Some(unit) = known.first() {
                driver.fill(Place { memory: &*memory, address: base + unit * UNIT + 8192 }, 7, 4096).unwrap();
            }
            memory.keep_only(&ranges).unwrap();
            known.retain(|unit| asked.contains(unit));
        }
        assert!(memory.base() == base && memory.bytes() >= 100 * UNIT);
        assert_eq!(memory.mapped_bytes(), known.len() * UNIT, "step {number}");
        for &unit in &known {
            for offset in places(unit) {
                assert!(read(driver, &*memory, offset, 4096) == content(unit), "unit {unit} after step {number}");
            }
        }
    }
}

/// Host memory can be registered, released and registered again, if the driver can at all.
pub(crate) fn registration(driver: &dyn Driver, supported: bool) {
    let memory = HostMemory::map(8 << 20).unwrap();
    let range = |offset: usize, bytes| memory.range(memory.address() + offset, bytes).unwrap();
    for cut in [4 << 20, (3 << 20) + 4096] {
        // SAFETY: the mapping outlives the registrations.
        let first = unsafe { driver.register(range(0, cut)) };
        // SAFETY: as above.
        let second = unsafe { driver.register(range(cut, (8 << 20) - cut)) };
        assert_eq!(first.is_ok() && second.is_ok(), supported, "{first:?} {second:?}");
    }
}

macro_rules! driver_suite {
    ($name:ident, [$(#[$attribute:meta])*], $driver:expr, registers: $registers:expr) => {
        mod $name {
            driver_suite!(@case [$(#[$attribute])*] round_trips, $driver);
            driver_suite!(@case [$(#[$attribute])*] fills, $driver);
            driver_suite!(@case [$(#[$attribute])*] rows, $driver);
            driver_suite!(@case [$(#[$attribute])*] copies, $driver);
            driver_suite!(@case [$(#[$attribute])*] lists, $driver);
            driver_suite!(@case [$(#[$attribute])*] times, $driver);
            driver_suite!(@case [$(#[$attribute])*] order, $driver);
            driver_suite!(@case [$(#[$attribute])*] taken, $driver);
            driver_suite!(@case [$(#[$attribute])*] exhaustion, $driver);
            driver_suite!(@case [$(#[$attribute])*] elastic, $driver);
            driver_suite!(@case [$(#[$attribute])*] sparse, $driver);
            driver_suite!(@case [$(#[$attribute])*] elastic_waits, $driver);

            #[test]
            $(#[$attribute])*
            fn registration() {
                super::registration(&*$driver, $registers);
            }
        }
    };
    (@case [$(#[$attribute:meta])*] $case:ident, $driver:expr) => {
        #[test]
        $(#[$attribute])*
        fn $case() {
            super::$case(&*$driver);
        }
    };
}

driver_suite!(fake, [], Box::new(crate::gpu::fake::Fake::default()), registers: true);
driver_suite!(bounce, [], crate::gpu::bounce::over_fake(), registers: true);
driver_suite!(slow, [], crate::gpu::slow::over_fake(), registers: true);
driver_suite!(cuda, [#[ignore = "needs a CUDA device"]], crate::gpu::cuda::for_tests(), registers: true);
driver_suite!(generic, [#[ignore = "needs the stock host's libraries; make test runs it"]], crate::gpu::suite::generic_over_cpu(), registers: false);

driver_suite!(late, [#[ignore = "needs the stock host's libraries; make test runs it"]], crate::gpu::suite::late_over_cpu(), registers: false);

fn late_over_cpu() -> Box<dyn Driver> {
    Box::new(super::late::Late::new(cpu_buffer_type(), true, false, 1).unwrap())
}

/// The generic driver over the CPU device of the stock host whose folder `GGML_MOE_STOCK` names.
fn generic_over_cpu() -> Box<dyn Driver> {
    Box::new(super::generic::Generic::new(cpu_buffer_type(), true, false))
}

fn cpu_buffer_type() -> crate::abi::inner::BufferType {
    let folder = std::env::var("GGML_MOE_STOCK").expect("GGML_MOE_STOCK names the folder of the stock host");
    crate::abi::load_for_tests(&folder)
}
