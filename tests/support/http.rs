//! A minimal HTTP/1.1 client for a server on this machine: one request per connection, nothing but std.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddr, UnixListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// An answer: its status and its body.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

/// A loopback port for a server that is about to start; until this is dropped no other test of this machine gets it.
///
/// It is not one of those that Linux gives to connections and to whoever asks for any port (from 32768 on), so that it stays free until the
/// server listens. Tests know of each other by a local socket with the port in its name, which goes with its process.
pub struct Port {
    number: u16,
    _held: UnixListener,
}

impl Port {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 20_000;

    /// Finds a port and holds it.
    pub fn hold() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        for _ in 0..Self::COUNT {
            let place = process::id().wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
            let number = u16::try_from(Self::FIRST + place % Self::COUNT).expect("below 32768");
            let name = format!("ggml-moe-test-port-{number}");
            let held = LocalAddr::from_abstract_name(name).and_then(|name| UnixListener::bind_addr(&name));
            if let (Ok(held), Ok(_)) = (held, TcpListener::bind((Ipv4Addr::LOCALHOST, number))) {
                return Self { number, _held: held };
            }
        }
        panic!("no loopback port is free");
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// Sends a request and returns the connection, to be read by the caller; a body makes it a POST.
pub fn open(port: u16, path: &str, body: Option<&str>, limit: Duration) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    let (method, body) = (if body.is_some() { "POST" } else { "GET" }, body.unwrap_or(""));
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(stream)
}

/// Sends a request and reads the whole answer.
pub fn request(port: u16, path: &str, body: Option<&str>, limit: Duration) -> io::Result<Answer> {
    let mut bytes = Vec::new();
    open(port, path, body, limit)?.read_to_end(&mut bytes)?;
    parse(&bytes).ok_or_else(|| io::Error::other("not a complete HTTP answer"))
}

/// Splits an answer; `None` when it is cut short or of a form that the servers here do not send.
fn parse(bytes: &[u8]) -> Option<Answer> {
    let (head, body) = split(bytes, b"\r\n\r\n")?;
    let head = std::str::from_utf8(head).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let field = |wanted: &str| {
        let mut fields = head.lines().filter_map(|line| line.split_once(':'));
        fields.find_map(|(name, value)| name.eq_ignore_ascii_case(wanted).then_some(value.trim()))
    };
    let body = if field("transfer-encoding") == Some("chunked") {
        joined(body)?
    } else {
        let length: usize = field("content-length")?.parse().ok()?;
        (body.len() == length).then(|| body.to_vec())?
    };
    Some(Answer { status, body: String::from_utf8_lossy(&body).into_owned() })
}

/// The contents of a body in chunks, each behind its length in hexadecimal; the one of length 0 is the last.
fn joined(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let (length, behind) = split(rest, b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(length).ok()?, 16).ok()?;
        body.extend(behind.get(..length)?);
        rest = behind.get(length..)?.strip_prefix(b"\r\n")?;
        if length == 0 {
            return Some(body);
        }
    }
}

/// What stands before and behind the first `mark`.
fn split<'a>(bytes: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let position = bytes.windows(mark.len()).position(|window| window == mark)?;
    Some((&bytes[..position], &bytes[position + mark.len()..]))
}
