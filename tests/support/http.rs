//! A minimal HTTP/1.1 client for a server on this machine: one request per connection, nothing but std.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// An answer: its status and its body.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

/// A loopback port that nothing listens on now.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free loopback port");
    listener.local_addr().expect("a bound socket has an address").port()
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
    parse(&String::from_utf8_lossy(&bytes)).ok_or_else(|| io::Error::other("not a complete HTTP answer"))
}

/// Splits an answer; `None` when it is cut short or of a form that the servers here do not send.
fn parse(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length: usize = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    })?;
    (body.len() == length).then(|| Answer { status, body: body.to_owned() })
}
