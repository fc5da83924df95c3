//! The servers of a user: `ps` without an address, `stop`, ports that are taken, and what `serve` says in a terminal.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Output};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pty::Pty;
use crate::{check_refused, consort, oracle, text};
use testing::bounded::{self, ended};
use testing::joined_node::{JoinedNode, KEY};
use testing::serving::{Server, ask, kill};

/// A user whose state folder is this one.
struct User(TempDir);

impl User {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn state(&self) -> &Path {
        self.0.path()
    }

    fn serve(&self, options: &[&str]) -> Server {
        Server::start_with(options, &[("XDG_STATE_HOME", self.state().to_str().unwrap())])
    }

    fn call(&self, args: &[&str]) -> Output {
        bounded::output(consort(args).env("XDG_STATE_HOME", self.state()))
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> String {
        let output = self.call(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    #[track_caller]
    fn refused(&self, args: &[&str], code: i32, why: &str) {
        let output = self.call(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(why), "{args:?}: {error}");
    }
}

fn port(server: &Server) -> &str {
    server.address.rsplit_once(':').unwrap().1
}

fn end(child: &mut Child) -> Option<i32> {
    ended(child).code()
}

#[test]
fn a_user_sees_and_ends_the_servers_that_they_started() {
    let user = User::new();
    user.refused(&["stop"], 1, "no server of yours runs");
    let (mut first, mut second) = (user.serve(&[]), user.serve(&[]));
    let table = user.succeed(&["ps"]);
    for server in [&first, &second] {
        let line = format!("http://{}, process {}\n", server.address, server.child.id());
        assert!(table.contains(&line), "{table}");
    }
    let lines = user.succeed(&["ps", "--json"]);
    let urls: Vec<String> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["url"].as_str().unwrap().into())
        .collect();
    assert_eq!(urls, [&first, &second].map(|server| format!("http://{}", server.address)));
    // Another user has none.
    User::new().refused(&["stop"], 1, "no server of yours runs");

    user.refused(&["stop"], 2, "several servers run");
    user.refused(&["stop", "1"], 1, "no server of yours on this machine is 1");
    let stopped = user.succeed(&["stop", port(&first)]);
    assert!(stopped.contains(&first.address) && stopped.contains("has ended"), "{stopped}");
    assert_eq!(end(&mut first.child), Some(0));
    let stopped = user.succeed(&["stop"]);
    assert!(stopped.contains(&second.address), "{stopped}");
    assert_eq!(end(&mut second.child), Some(0));
    user.refused(&["stop", "--all"], 1, "no server of yours runs");
}

#[test]
fn a_server_that_was_killed_is_not_listed() {
    let user = User::new();
    let mut killed = user.serve(&[]);
    let mut other = user.serve(&[]);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    assert!(!user.succeed(&["ps"]).contains(&killed.address));
    user.succeed(&["stop", "--all"]);
    assert_eq!(end(&mut other.child), Some(0));
}

#[test]
fn a_model_is_named_by_its_own_name() {
    let user = User::new();
    let server = user.serve(&[]);
    user.refused(&["stop", "unheard-of"], 1, "unheard-of is neither a model that is loaded nor a running answer");
    user.refused(&["stop", "resp_0"], 1, "no server has the answer resp_0");
    user.refused(&["stop", "resp_0/../x"], 1, "no server has the answer");
    assert!(ask(&server.address, "GET /ready", "", "").starts_with("HTTP/1.1 200"));
}

/// Answers requests as Ollama does of a model that is unloaded once it is told to. Returns its address and what it was sent.
fn server_of_other_models() -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, (seen, requests)) = (listener.local_addr().unwrap(), channel());
    thread::spawn(move || {
        let mut loaded = r#"[{"name": "small:latest"}, {"name": "owner/big:Q4_K_M"}]"#;
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") {
                let start = head.len();
                stream.read_line(&mut head).unwrap();
                let line = head[start..].to_ascii_lowercase();
                length = line.strip_prefix("content-length: ").map_or(length, |text| text.trim().parse().unwrap());
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let path = head.split(' ').nth(1).unwrap();
            let (status, reply) = match path {
                "/api/ps" => ("200 OK", format!(r#"{{"models": {loaded}}}"#)),
                "/api/generate" => {
                    loaded = r#"[{"name": "owner/big:Q4_K_M"}]"#;
                    ("200 OK", r#"{"done": true}"#.to_owned())
                }
                "/v1/responses/resp_1/cancel" | "/v1/answers/mine/cancel" => ("200 OK", "{}".to_owned()),
                _ => ("404 Not Found", "{}".to_owned()),
            };
            seen.send(format!("{path} {}", text(&body))).unwrap();
            let length = reply.len();
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
            stream.get_mut().write_all((head + &reply).as_bytes()).unwrap();
        }
    });
    (format!("http://{address}"), requests)
}

#[test]
fn a_model_is_unloaded_and_an_answer_is_ended_where_they_are() {
    let (user, (url, requests)) = (User::new(), server_of_other_models());
    let stopped = user.succeed(&["stop", "small", "--url", &url]);
    assert_eq!(stopped, format!("small is unloaded at {url}\n"));
    let sent: Vec<_> = requests.try_iter().collect();
    let asked: Value = serde_json::from_str(sent[1].strip_prefix("/api/generate ").unwrap()).unwrap();
    assert_eq!(asked, json!({"model": "small:latest", "keep_alive": 0}));
    assert_eq!((sent.len(), &*sent[0], &*sent[2]), (3, "/api/ps ", "/api/ps "));
    user.refused(&["stop", "small", "--url", &url], 1, "neither a model that is loaded nor a running answer");
    user.refused(&["stop", "owner/big:Q4_K_M", "--url", &url], 1, "keeps owner/big:Q4_K_M");
    assert_eq!(user.succeed(&["stop", "resp_1", "--url", &url]), format!("resp_1 is ended at {url}\n"));
    assert_eq!(user.succeed(&["stop", "mine", "--url", &url]), format!("mine is ended at {url}\n"));
    user.refused(&["stop", "resp_2", "--url", &url], 1, "no server has the answer resp_2");
}

#[test]
fn a_port_that_is_taken_is_told_with_the_server_that_has_it() {
    let user = User::new();
    let server = user.serve(&[]);
    let model = oracle("qwen3/model-f32");
    user.refused(
        &["serve", &model, "--port", port(&server)],
        1,
        &format!("by your server at http://{}", server.address),
    );
    let stranger = User::new();
    stranger.refused(
        &["serve", &model, "--port", port(&server)],
        1,
        "in use by another program: choose another with --port",
    );
    let key = ["--cluster-key", KEY];
    stranger.refused(&[&["ranks", "--listen", &server.address], &key[..]].concat(), 1, "choose another with --listen");
    stranger.refused(&[&["join", "--listen", &server.address], &key[..]].concat(), 1, "choose another with --listen");
    let admin = ["serve", &model, "--port", "0", "--admin", &server.address];
    stranger.refused(&admin, 1, "choose another with --admin");
}

#[test]
fn a_wrong_model_is_an_error_before_the_server_listens() {
    let folder = tempfile::tempdir().unwrap();
    for (model, why) in [
        ("unknown", "neither a file, a folder, a name of the catalogue"),
        ("./missing.gguf", "no such file"),
        ("no/where", "is not on this machine"),
        (folder.path().to_str().unwrap(), "open the model"),
    ] {
        let refused = check_refused(&["serve", model, "--port", "0"], 1, why);
        assert!(!refused.contains("listening"), "{refused}");
    }
}

#[test]
fn in_a_terminal_the_server_says_hello_and_is_quiet() {
    let model = oracle("qwen3/model-f32");
    let user = User::new();
    let start = |options: &[&str]| {
        let mut command =
            consort(&[&["serve", &model, "--port", "0", "--served-model-name", "tiny"], options].concat());
        command.env("XDG_STATE_HOME", user.state());
        Pty::start(command, 120)
    };
    let mut terminal = start(&["--host", "0.0.0.0"]);
    let hello = terminal.read_to("tiny is ready after ");
    let url = hello.split("consort serves tiny on ").nth(1).unwrap().lines().next().unwrap();
    for words in [
        format!("chat page   {url}/\n"),
        format!("OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none\n"),
        "warning: no API key is set".to_owned(),
    ] {
        assert!(hello.contains(&words), "{words}: {hello}");
    }
    assert!(!hello.contains("INFO") && !hello.contains("listening"), "{hello}");
    let address = url.strip_prefix("http://").unwrap();
    assert!(
        ask(address, "POST /v1/completions", "", r#"{"prompt": "a", "max_tokens": 1}"#).starts_with("HTTP/1.1 200")
    );
    kill("TERM", terminal.id());
    let (code, rest) = terminal.end();
    assert_eq!(code, Some(0), "{rest}");
    assert!(!rest.contains("/v1/completions"), "a request is shown: {rest}");

    let mut terminal = start(&["-v"]);
    let line = terminal.read_to("listening on http://");
    assert!(line.contains("INFO"), "{line}");
    let address = terminal.read_to(" ").trim().to_owned();
    terminal.read_to("ready: tiny");
    ask(&address, "POST /v1/completions", "", r#"{"prompt": "a", "max_tokens": 1}"#);
    terminal.read_to("/v1/completions");
    kill("TERM", terminal.id());
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn machines_with_the_same_name_are_told_apart() {
    let nodes = [(); 2].map(|()| JoinedNode::start(&["--name", "attic"]));
    let peers = nodes.iter().map(|node| node.address.as_str()).collect::<Vec<_>>().join(",");
    let user = User::new();
    let _server = user.serve(&["--node", &peers, "--split", "1,2", "--cluster-key", KEY]);
    let table = user.succeed(&["ps"]);
    assert!(table.contains("this machine: layers 0..1, "), "{table}");
    for (node, layers) in nodes.iter().zip(["1..2", "2..4"]) {
        assert!(table.contains(&format!("attic ({}): layers {layers}, ", node.address)), "{table}");
    }
    let options = ["--node", &peers, "--cluster-key", KEY, "--context", "64"];
    let plan = user.succeed(&[&["plan", &oracle("qwen3/model-f32")], &options[..]].concat());
    for node in &nodes {
        assert!(plan.contains(&format!("attic ({})", node.address)), "{plan}");
    }
}
