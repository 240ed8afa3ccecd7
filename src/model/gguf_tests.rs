//! Headers written here and read back, broken ones, and the fixture.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::model::moe::MoeShape;

fn text(value: &[u8]) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value].concat()
}

/// A file of keys (name, type, bytes of the value) and tensors (name, shape, type, offset).
fn file(keys: &[(&str, u32, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (name, kind, value) in keys {
        out.extend(text(name.as_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(value);
    }
    for (name, shape, kind, offset) in tensors {
        out.extend(text(name.as_bytes()));
        out.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
        shape.iter().for_each(|extent| out.extend(extent.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out
}

fn list(kind: u32, count: u64, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat()
}

fn refused(bytes: &[u8]) -> String {
    Header::read(bytes).unwrap_err().to_string()
}

#[test]
fn a_header_is_read() {
    let long = vec![b'x'; 20_000];
    let keys = [
        ("a.text", 8, text("grüße".as_bytes())),
        ("a.long", 8, text(&long)),
        ("a.minus", 5, (-3_i32).to_le_bytes().to_vec()),
        ("a.half", 6, 0.5_f32.to_le_bytes().to_vec()),
        ("a.yes", 7, vec![1]),
        ("a.list", 9, list(4, 3, &[1, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0])),
        ("a.words", 9, list(8, 2, &[text(b"a"), text(b"bc")].concat())),
        ("a.many", 9, list(0, 5000, &[7; 5000])),
        ("general.alignment", 4, 64_u32.to_le_bytes().to_vec()),
    ];
    let bytes = file(&keys, &[("t", &[256, 3], 12, 0), ("u", &[], 0, 448)]);
    let header = Header::read(&bytes[..]).unwrap();
    assert_eq!(header.text("a.text"), Some("grüße"));
    assert_eq!(header.value("a.long"), Some(&Value::Text(None)));
    assert_eq!(header.value("a.minus"), Some(&Value::Integer(-3)));
    assert_eq!((header.number("a.minus"), header.number("a.list"), header.number("none")), (None, Some(9), None));
    assert_eq!(header.value("a.half"), Some(&Value::Float(0.5)));
    assert_eq!(header.value("a.yes"), Some(&Value::Bool(true)));
    assert_eq!(header.value("a.words"), Some(&Value::List { count: 2, numbers: Vec::new() }));
    assert_eq!(header.value("a.many"), Some(&Value::List { count: 5000, numbers: Vec::new() }), "counted, not kept");
    assert_eq!((header.tensors[0].bytes, header.tensors[1].bytes, header.tensors[1].offset), (432, 4, 448));
    assert_eq!(header.data_start, (bytes.len() as u64).next_multiple_of(64));
    for length in 0..bytes.len() {
        assert!(Header::read(&bytes[..length]).is_err(), "cut at {length}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    assert_eq!(refused(b"GGML\x03\0\0\0"), "not a GGUF file");
    assert_eq!(refused(b"GG"), "the header ends after 0 bytes, within the magic");
    assert_eq!(refused(b"GGUF\x01\0\0\0"), "GGUF version 1 is not known (2 and 3 are)");
    assert_eq!(refused(b"GGUF\0\0\0\x03"), "a GGUF file for big-endian machines");
    assert!(refused(&[&b"GGUF\x03\0\0\0"[..], &[0xff; 16]].concat()).contains("too many"));
    let key = |kind, value: Vec<u8>| refused(&file(&[("k\n", kind, value)], &[]));
    assert_eq!(key(13, vec![]), "key \"k?\" is of type 13");
    assert_eq!(key(9, list(9, 1, &[])), "key \"k?\" is a list of type 9");
    assert_eq!(key(9, list(10, u64::MAX, &[])), "key \"k?\" is a list of 18446744073709551615");
    assert!(key(8, u64::MAX.to_le_bytes().to_vec()).contains("ends after"));
    assert!(key(9, list(8, u64::MAX, &text(b"a"))).contains("ends after"), "no memory for a count");
    let tensor = |shape: &[u64], kind| refused(&file(&[], &[("t", shape, kind, 0)]));
    assert_eq!(tensor(&[1; 5], 0), "tensor \"t\" has 5 dimensions");
    assert_eq!(tensor(&[32], 4), "tensor \"t\" is of type 4, which is not known");
    assert_eq!(tensor(&[100], 12), "tensor \"t\" of type q4_K cannot have the shape [100]");
    assert!(tensor(&[1 << 40, 1 << 40], 0).contains("cannot have the shape"));
    let twice = file(&[("k", 7, vec![0]), ("k", 7, vec![0])], &[]);
    assert_eq!(refused(&twice), "key \"k\" stands twice");
    let twice = file(&[], &[("t", &[1], 0, 0), ("t", &[1], 0, 32)]);
    assert_eq!(refused(&twice), "tensor \"t\" stands twice");
    let name = "n".repeat(2000);
    assert_eq!(refused(&file(&[(&name, 7, vec![0])], &[])), "the name of a key has 2000 bytes");
    let aligned = |bytes: u32| file(&[("general.alignment", 4, bytes.to_le_bytes().to_vec())], &[]);
    assert!(Header::read(&aligned(1)[..]).is_ok());
    assert_eq!(refused(&aligned(0)), "an alignment of 0");
    assert_eq!(refused(&aligned(48)), "an alignment of 48");
}

#[test]
fn the_fixture() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-docs-moe.Q4_K_M.gguf");
    let header = Header::open(&path).unwrap();
    let last = header.tensors.iter().map(|tensor| tensor.offset + tensor.bytes).max().unwrap();
    let padded = header.data_start + last.next_multiple_of(32);
    assert_eq!(padded, path.metadata().unwrap().len(), "the tensors fill the file");
    assert_eq!(header.missing, 0);
    let shape = MoeShape::open(&path).unwrap();
    assert_eq!((shape.layers, shape.experts(), shape.expert_layers.len()), (6, 192, 6));
    assert_eq!(shape.architecture, "qwen3moe");
    let sum: u64 = header.tensors.iter().map(|tensor| tensor.bytes).sum();
    assert_eq!(shape.expert_bytes() + shape.input_bytes + shape.dense_bytes, sum);
}

#[test]
fn a_file_that_is_cut_tells_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let bytes = file(&[], &[("a", &[100], 0, 0), ("b", &[10], 0, 416)]);
    let data = bytes.len().next_multiple_of(32);
    for (length, missing) in [(data + 456, 0), (data + 480, 0), (data + 455, 1), (data + 100, 356), (data, 456)] {
        let mut bytes = bytes.clone();
        bytes.resize(length, 0);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(Header::open(&path).unwrap().missing, missing, "{length}");
    }
    let far = file(&[], &[("a", &[100], 0, u64::MAX - 8)]);
    std::fs::write(&path, &far).unwrap();
    assert!(Header::open(&path).unwrap().missing > u64::MAX / 2);
}

#[test]
fn only_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("m.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for place in [&*pipe, folder.path(), Path::new("/dev/zero")] {
        let error = Header::open(place).unwrap_err().to_string();
        assert!(error.contains("it is no regular file"), "{place:?}: {error}");
    }
}

#[test]
fn parts_of_a_split_model_lie_beside_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let part = |number: u16, tensor: &str| {
        let keys = [("split.no", 2, (number - 1).to_le_bytes().to_vec()), ("split.count", 2, vec![3, 0])];
        let path = folder.path().join(format!("m-{number:05}-of-00003.gguf"));
        std::fs::write(&path, file(&keys, &[(tensor, &[1], 0, 0)])).unwrap();
        path
    };
    let paths = [part(1, "a"), part(2, "b"), part(3, "c")];
    for path in &paths {
        let names: Vec<String> =
            open_all(path).unwrap().into_iter().map(|header| header.tensors[0].name.clone()).collect();
        assert_eq!(names, ["a", "b", "c"]);
    }
    std::fs::remove_file(&paths[1]).unwrap();
    assert!(open_all(&paths[0]).unwrap_err().to_string().contains("m-00002-of-00003.gguf"));
    let other = folder.path().join("other.gguf");
    std::fs::rename(&paths[0], &other).unwrap();
    assert!(open_all(&other).unwrap_err().to_string().contains("not named"));
    assert_eq!(split_prefix("x-00002-of-00003.gguf", 3), Some("x"));
    assert_eq!(split_prefix("x-2-of-00003.gguf", 3), None);
    assert_eq!(split_prefix("-of-00003.gguf", 3), None);
}

proptest! {
    /// What is written is read, whatever the names and shapes are; what stands behind does not matter.
    #[test]
    fn headers_come_back(
        names in proptest::collection::btree_set("[ -~]{1,40}", 0..12),
        shape in proptest::collection::vec(0_u64..100, 0..4),
        numbers in proptest::collection::vec(any::<u64>(), 0..20),
        behind in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let values: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let keys: Vec<_> = names.iter().map(|name| (name.as_str(), 9, list(10, numbers.len() as u64, &values)))
            .filter(|(name, ..)| *name != "general.alignment").collect();
        let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &shape[..], 1, 32)).collect();
        let bytes = file(&keys, &tensors);
        let header = Header::read(&bytes[..]).unwrap();
        prop_assert_eq!(header.keys.len(), keys.len());
        let read: Vec<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        prop_assert_eq!(read, names.iter().map(String::as_str).collect::<Vec<_>>());
        prop_assert!(header.tensors.iter().all(|tensor| tensor.shape == shape && tensor.bytes == 2 * shape.iter().product::<u64>()));
        let whole: Vec<i128> = numbers.iter().map(|number| i128::from(*number)).collect();
        let wanted = Value::List { count: numbers.len() as u64, numbers: whole };
        prop_assert!(header.keys.iter().all(|(_, value)| *value == wanted));
        prop_assert_eq!(Header::read(&[bytes, behind].concat()[..]).unwrap(), header);
    }

    #[test]
    fn any_bytes_end_somewhere(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Header::read(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat()[..]);
    }
}
