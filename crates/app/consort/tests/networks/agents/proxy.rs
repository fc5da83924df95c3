//! `Proxy`: passes requests on to a server, after it has changed their bodies, and the responses back as they are.

use std::io::{BufRead, BufReader, Read, Write, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::Value;

pub struct Proxy {
    pub address: String,
    requests: Arc<Mutex<Vec<Value>>>,
}

impl Proxy {
    /// Listens on loopback until the process ends. `direct` changes the body of each request that has one.
    pub fn start(server: &str, direct: fn(&mut Value)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests: Arc<Mutex<Vec<Value>>> = Arc::default();
        let (server, seen) = (server.to_owned(), Arc::clone(&requests));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (server, seen) = (server.clone(), Arc::clone(&seen));
                // A client may hang up at any time: the test sees it at the end of its program.
                thread::spawn(move || pass_on(client.ok()?, &server, direct, &seen));
            }
        });
        Self { address, requests }
    }

    /// The bodies of the requests so far, as the client has sent them.
    pub fn requests(&self) -> Vec<Value> {
        self.requests.lock().unwrap().clone()
    }
}

/// Passes one request on; the response closes the connection. `None` if either side has hung up.
fn pass_on(client: TcpStream, server: &str, direct: fn(&mut Value), seen: &Mutex<Vec<Value>>) -> Option<()> {
    let mut reader = BufReader::new(client.try_clone().ok()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
        let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
        match name.as_str() {
            _ if line == "\r\n" => break,
            "content-length" => length = line.split(':').nth(1)?.trim().parse().ok()?,
            "connection" | "accept-encoding" => {}
            _ => head += &line,
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    if let Ok(mut request) = serde_json::from_slice::<Value>(&body) {
        seen.lock().unwrap().push(request.clone());
        direct(&mut request);
        body = request.to_string().into_bytes();
    }
    let mut upstream = TcpStream::connect(server).ok()?;
    write!(upstream, "{head}connection: close\r\ncontent-length: {}\r\n\r\n", body.len()).ok()?;
    upstream.write_all(&body).ok()?;
    let mut client = client;
    let passed = copy(&mut upstream, &mut client);
    // The client may be gone already.
    let _ = client.shutdown(Shutdown::Both);
    passed.ok().map(drop)
}
