//! `ChatServer`: a server with OpenAI's chat API whose answers a test writes piece by piece.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};
use testing::bounded::WAIT_MAX;

pub struct ChatServer {
    pub url: String,
    requests: Receiver<Value>,
    pieces: Sender<Piece>,
    left: Receiver<()>,
}

enum Piece {
    Bytes(Vec<u8>),
    /// Closes the connection.
    Close,
}

impl ChatServer {
    /// A server of the models `first` and `other`.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let ((asked, requests), (pieces, sent), (leaves, left)) = (channel(), channel(), channel());
        let sent = Arc::new(Mutex::new(sent));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (asked, sent, leaves) = (asked.clone(), Arc::clone(&sent), leaves.clone());
                thread::spawn(move || serve(stream.unwrap(), &asked, &sent, &leaves));
            }
        });
        Self { url, requests, pieces, left }
    }

    /// The next request for an answer.
    #[track_caller]
    pub fn request(&self) -> Value {
        self.requests.recv_timeout(WAIT_MAX).unwrap()
    }

    /// The last message of the next request.
    #[track_caller]
    pub fn asked(&self) -> String {
        let request = self.request();
        let last = request["messages"].as_array().unwrap().last().unwrap();
        last["content"].as_str().unwrap().to_owned()
    }

    pub fn text(&self, text: &str) {
        self.delta(json!({"content": text}), Value::Null);
    }

    pub fn reasoning(&self, text: &str) {
        self.delta(json!({"reasoning_content": text}), Value::Null);
    }

    /// Ends the answer.
    pub fn end(&self) {
        self.delta(json!({}), "stop".into());
        self.bytes(b"data: [DONE]\n\n");
        self.close();
    }

    pub fn end_with(&self, text: &str) {
        self.text(text);
        self.end();
    }

    pub fn bytes(&self, bytes: &[u8]) {
        self.pieces.send(Piece::Bytes(bytes.to_vec())).unwrap();
    }

    pub fn close(&self) {
        self.pieces.send(Piece::Close).unwrap();
    }

    /// Waits until the client has closed its connection. The answer is over.
    #[track_caller]
    pub fn wait_until_left(&self) {
        self.left.recv_timeout(WAIT_MAX).unwrap();
        self.close();
    }

    fn delta(&self, delta: Value, finish: Value) {
        let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
        self.bytes(format!("data: {chunk}\n\n").as_bytes());
    }
}

fn serve(stream: TcpStream, asked: &Sender<Value>, sent: &Mutex<Receiver<Piece>>, leaves: &Sender<()>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    if first.starts_with("GET /v1/models ") {
        let list = json!({"object": "list", "data": [{"id": "first"}, {"id": "other"}]}).to_string();
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
        stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{list}", list.len()).as_bytes()).unwrap();
        return;
    }
    assert!(first.starts_with("POST /v1/chat/completions "), "{first}");
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    asked.send(serde_json::from_slice(&body).unwrap()).unwrap();
    let leaves = leaves.clone();
    thread::spawn(move || {
        // The client sends nothing more: this ends when it closes the connection, however it does that.
        let _ = reader.read_to_end(&mut Vec::new());
        let _ = leaves.send(());
    });
    let sent = sent.lock().unwrap();
    while let Ok(Piece::Bytes(bytes)) = sent.recv() {
        // The client may have left.
        let _ = stream.write_all(&bytes);
    }
    let _ = stream.shutdown(std::net::Shutdown::Both);
}
