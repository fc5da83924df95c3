//! `ps` against a real server.

use crate::{check_refused, succeed};
use testing::reserved_port::ReservedPort;
use testing::serving::Server;

const KEY: &str = "a-key-for-ps";

#[test]
fn it_shows_what_a_server_serves() {
    let server = Server::start(&["--api-key", KEY]);
    let url = format!("http://{}", server.address);
    let table = succeed(&["ps", "--url", &url, "--api-key", KEY]);
    let (head, row) = table.split_once('\n').unwrap();
    assert!(head.starts_with("MODEL") && head.contains("CONTEXT"), "{table}");
    assert!(row.starts_with("m ") && row.contains("ready"), "{table}");
    let json = succeed(&["ps", "--url", &url, "--api-key", KEY, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["model"], &json["state"]), (&"m".into(), &"ready".into()));

    check_refused(&["ps", "--url", &url], 1, "wants a key");
    check_refused(&["ps", "--url", &url, "--api-key", "wrong"], 1, "does not know this key");
    check_refused(&["ps", "--url", &format!("{url}/v1"), "--api-key", KEY], 1, "is no consort server");
}

#[test]
fn without_a_server_it_says_so() {
    let unused = ReservedPort::reserve();
    check_refused(&["ps", "--url", &format!("http://{}", unused.address())], 1, "`consort serve` starts one");
    check_refused(&["ps", "--url", "nonsense"], 2, "write it as http://HOST:PORT");
}
