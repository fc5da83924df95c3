//! Tests of `/v1/cluster/invitation`: what it tells, and to whom.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use server::{ApiKeys, App, Config, InvitationSnapshot, InvitationState, Inviter, RemoteAddress};
use tower::ServiceExt as _;

const PATH: &str = "/v1/cluster/invitation";

/// Invitations that a test ends.
#[derive(Default)]
struct Scripted(Mutex<Option<InvitationSnapshot>>);

impl Inviter for Scripted {
    fn open(&self) -> Result<InvitationSnapshot, String> {
        let opened = InvitationSnapshot {
            name: "kit\nchen".to_owned(),
            port: 7421,
            addresses: vec!["192.168.1.5".parse().unwrap()],
            is_announced: true,
            tries_left: 3,
            state: InvitationState::Open { code: "012345".to_owned(), seconds_left: 600 },
        };
        Ok(self.0.lock().unwrap().get_or_insert(opened).clone())
    }

    fn last(&self) -> Option<InvitationSnapshot> {
        self.0.lock().unwrap().clone()
    }

    fn close(&self) {
        if let Some(last) = &mut *self.0.lock().unwrap() {
            last.state = InvitationState::Closed { why: "it was closed".to_owned() };
        }
    }
}

struct Server {
    app: Arc<App>,
    inviter: Arc<Scripted>,
}

impl Server {
    fn new(keys: &[&str]) -> Self {
        let app = App::new(Config { keys: ApiKeys::new(keys).unwrap(), ..Config::new("model") });
        let inviter = Arc::new(Scripted::default());
        app.set_inviter(Arc::clone(&inviter) as _);
        Self { app, inviter }
    }

    async fn ask(&self, method: Method, from: Option<&str>, headers: &[(&str, &str)]) -> (StatusCode, Value) {
        let mut request = Request::builder().method(method).uri(PATH);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(Body::empty()).unwrap();
        if let Some(from) = from {
            request.extensions_mut().insert(RemoteAddress(from.parse::<IpAddr>().unwrap()));
        }
        let response = server::router(&self.app).oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() })
    }
}

#[tokio::test]
async fn an_invitation_is_opened_shown_and_closed() {
    let server = Server::new(&[]);
    let ask = async |method| server.ask(method, Some("127.0.0.1"), &[]).await;
    let (status, body) = ask(Method::GET).await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &json!("no_invitation")));
    let (status, opened) = ask(Method::POST).await;
    let expected = json!({
        "state": "open", "code": "012345", "seconds_left": 600, "tries_left": 3, "command": "consort join",
        "command_with_address": "consort join 192.168.1.5:7421", "name": "kit\u{fffd}chen", "port": 7421,
        "joined": null, "reason": null,
    });
    assert_eq!((status, &opened), (StatusCode::OK, &expected));
    assert_eq!(ask(Method::POST).await.1, expected, "the same one");
    assert_eq!(ask(Method::GET).await.1, expected);
    assert_eq!(ask(Method::DELETE).await.0, StatusCode::NO_CONTENT);
    let (_, closed) = ask(Method::GET).await;
    let facts = |body: &Value| [&body["state"], &body["code"], &body["reason"]].map(Value::clone);
    assert_eq!(facts(&closed), [json!("closed"), Value::Null, json!("it was closed")]);
    server.inviter.0.lock().unwrap().as_mut().unwrap().state =
        InvitationState::Joined { name: "attic".to_owned(), address: "192.168.1.7".to_owned() };
    let (_, joined) = ask(Method::GET).await;
    assert_eq!(joined["joined"], json!({"name": "attic", "address": "192.168.1.7"}));
    assert_eq!(facts(&joined), [json!("joined"), Value::Null, Value::Null]);
}

#[tokio::test]
async fn without_keys_only_this_machine_and_its_own_page_may_invite() {
    let server = Server::new(&[]);
    let check = async |from: Option<&str>, headers: &[(&str, &str)], is_allowed: bool| {
        for method in [Method::POST, Method::GET, Method::DELETE] {
            let (status, body) = server.ask(method.clone(), from, headers).await;
            assert_eq!(status.is_success(), is_allowed, "{method} {from:?} {headers:?}: {body}");
            if !is_allowed {
                assert_eq!((status, &body["error"]["code"]), (StatusCode::FORBIDDEN, &json!("not_local")));
            }
        }
    };
    let local = ("host", "localhost:8000");
    check(Some("127.0.0.1"), &[local], true).await;
    check(Some("::1"), &[local], true).await;
    check(Some("::ffff:127.0.0.1"), &[local], true).await;
    check(Some("127.0.0.1"), &[local, ("origin", "http://localhost:8000")], true).await;
    // Another page on this machine, a page elsewhere, one without an origin of its own, another machine, and one behind a proxy.
    check(Some("127.0.0.1"), &[local, ("origin", "http://localhost:3000")], false).await;
    check(Some("127.0.0.1"), &[local, ("origin", "https://evil.example")], false).await;
    check(Some("127.0.0.1"), &[local, ("origin", "null")], false).await;
    check(Some("192.168.1.7"), &[("host", "192.168.1.5:8000")], false).await;
    check(Some("192.168.1.7"), &[local, ("origin", "http://localhost:8000")], false).await;
    check(None, &[local], false).await;
    check(Some("127.0.0.1"), &[local, ("x-forwarded-for", "192.168.1.7")], false).await;
    check(Some("127.0.0.1"), &[local, ("forwarded", "for=192.168.1.7"), ("origin", "http://localhost:8000")], false)
        .await;
}

#[tokio::test]
async fn with_keys_the_key_decides() {
    let server = Server::new(&["secret"]);
    assert_eq!(server.ask(Method::POST, Some("127.0.0.1"), &[]).await.0, StatusCode::UNAUTHORIZED);
    let key = ("authorization", "Bearer secret");
    assert_eq!(server.ask(Method::POST, Some("192.168.1.7"), &[key]).await.0, StatusCode::OK);
    assert_eq!(server.ask(Method::GET, None, &[("x-api-key", "other")]).await.0, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_server_without_a_cluster_says_so() {
    let server = Server { app: App::new(Config::new("model")), inviter: Arc::default() };
    for method in [Method::POST, Method::GET, Method::DELETE] {
        let (status, body) = server.ask(method, Some("127.0.0.1"), &[]).await;
        assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &json!("no_cluster")));
    }
}
