//! A client of HTTP/2 made of bytes, over a pipe in memory, so that the clock can be paused.

use std::convert::Infallible;

use axum::body::Bytes;
use axum::routing::get;
use futures_util::stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::Instant;

use super::*;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
/// The flag of an answer to `SETTINGS` or `PING`.
const ACK: u8 = 1;
const INITIAL_WINDOW_SIZE: u16 = 4;

struct Http2Client {
    pipe: DuplexStream,
    /// The types of the frames that arrived.
    frames: Vec<u8>,
    /// `INITIAL_WINDOW_SIZE` of the server.
    window: Option<u32>,
}

impl Http2Client {
    /// Asks for an endless response, and gives it no window.
    async fn new(mut pipe: DuplexStream) -> Self {
        pipe.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let mut client = Self { pipe, frames: Vec::new(), window: None };
        client.send(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]).await.unwrap();
        // GET, http, `:path` and `:authority`, in HPACK without an index.
        let headers = b"\x82\x86\x04\x08/endless\x01\x09localhost";
        client.send(HEADERS, 0x5, 1, headers).await.unwrap();
        client
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.pipe.write_all(&frame).await
    }

    /// Answers settings and pings until the connection is closed. With `reads`, gives the response one byte for each ping.
    async fn run(&mut self, reads: bool) -> io::Result<()> {
        loop {
            let mut head = [0; 9];
            self.pipe.read_exact(&mut head).await?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            self.pipe.read_exact(&mut payload).await?;
            let (kind, is_answer) = (head[3], head[4] & ACK != 0);
            self.frames.push(kind);
            match kind {
                SETTINGS if !is_answer => {
                    let named = |entry: &&[u8]| entry[..2] == INITIAL_WINDOW_SIZE.to_be_bytes();
                    let entry = payload.chunks(6).find(named);
                    self.window = entry.map(|entry| u32::from_be_bytes(entry[2..].try_into().unwrap()));
                    self.send(SETTINGS, ACK, 0, &[]).await?;
                }
                PING if !is_answer => {
                    self.send(PING, ACK, 0, &payload).await?;
                    if reads {
                        self.send(WINDOW_UPDATE, 0, 1, &1_u32.to_be_bytes()).await?;
                    }
                }
                _ => {}
            }
        }
    }
}

/// Serves a client that runs for ten timeouts at most. Returns how long it was connected.
async fn connected_for(reads: bool) -> (Http2Client, Duration) {
    let endless = async || Body::from_stream(stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from_static(b"x"))));
    let router = Router::new().route("/endless", get(endless));
    let connections = Connections::new(ConnectionLimits::new(1), ConnectionMetrics::default());
    let (_close, closing) = watch::channel(false);
    let server = Server { router, acceptor: None, closing };
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let serving = tokio::spawn(async move {
        let connection = connections.admit([127, 0, 0, 1].into()).await.unwrap();
        server.serve_http(ours, std::net::Ipv4Addr::LOCALHOST.into(), &connection).await
    });
    let (mut client, begun) = (Http2Client::new(theirs).await, Instant::now());
    // An error is the end of the connection.
    let _ = timeout(WRITE_TIMEOUT * 10, client.run(reads)).await;
    serving.abort();
    (client, begun.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_client_that_gives_no_window_is_disconnected() {
    let (client, time) = connected_for(false).await;
    assert!(client.frames.contains(&HEADERS) && client.frames.contains(&PING) && !client.frames.contains(&DATA));
    assert!(time >= WRITE_TIMEOUT && time <= WRITE_TIMEOUT * 3, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_slowly_stays_connected() {
    let (client, time) = connected_for(true).await;
    assert!(client.frames.contains(&DATA));
    assert!(time >= WRITE_TIMEOUT * 10, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_buffers_little_of_what_is_sent() {
    let (client, _) = connected_for(false).await;
    assert_eq!(client.window, Some(WINDOW_BYTES));
}
