//! A minimal HTTP/1.1 client for a server on this machine: one request per connection, nothing but std.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
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

/// A loopback port that nothing listens on now, another one at each call. It lies below those that the system gives out by itself: a connection
/// of a test that runs at the same time cannot take it before the server does.
pub fn free_port() -> u16 {
    /// The ports used here, and how far apart the processes of one run begin.
    const PORTS: (u32, u32) = (12_000, 20_000);
    const APART: u32 = 211;
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(APART);
    let next = || begin.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)) % PORTS.1 + PORTS.0;
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let mut ports = (0..PORTS.1).filter_map(|_| u16::try_from(next()).ok());
    ports.find(is_free).expect("a free loopback port")
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
