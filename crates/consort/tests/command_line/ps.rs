//! `ps` against a real server.

use std::net::TcpListener;
use std::process::{Child, Stdio};

use crate::bounded::Log;
use crate::{check_refused, consort, oracle, succeed};

const KEY: &str = "a-key-for-ps";

struct Server {
    child: Child,
    url: String,
}

impl Server {
    /// Starts a server and waits until it is ready.
    fn start() -> Self {
        let model = oracle("qwen3/model-f32");
        let args = ["serve", &model, "--port", "0", "--served-model-name", "tiny", "--api-key", KEY];
        let mut command = consort(&args);
        command.env_remove("CONSORT_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let line = log.line_with("listening on http://");
        let address = line.split("http://").nth(1).unwrap().split([' ', '"']).next().unwrap().trim().to_owned();
        log.line_with("ready: ");
        Self { child, url: format!("http://{address}") }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_shows_what_a_server_serves() {
    let server = Server::start();
    let table = succeed(&["ps", "--url", &server.url, "--api-key", KEY]);
    let (head, row) = table.split_once('\n').unwrap();
    assert!(head.starts_with("MODEL") && head.contains("CONTEXT"), "{table}");
    assert!(row.starts_with("tiny") && row.contains("ready"), "{table}");
    let json = succeed(&["ps", "--url", &server.url, "--api-key", KEY, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["model"], &json["state"]), (&"tiny".into(), &"ready".into()));

    check_refused(&["ps", "--url", &server.url], 1, "wants a key");
    check_refused(&["ps", "--url", &server.url, "--api-key", "wrong"], 1, "does not know this key");
    check_refused(&["ps", "--url", &format!("{}/v1", server.url), "--api-key", KEY], 1, "is no consort server");
}

#[test]
fn without_a_server_it_says_so() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    check_refused(&["ps", "--url", &format!("http://127.0.0.1:{port}")], 1, "`consort serve` starts one");
    check_refused(&["ps", "--url", "nonsense"], 2, "write it as http://HOST:PORT");
}
