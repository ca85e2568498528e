"""A stand-in for the Hugging Face hub on 127.0.0.1: the requests that fetching a model makes, and what can go wrong."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator


@dataclasses.dataclass
class Repository:
  """Files by commit, and names of commits."""

  commits: dict[str, dict[str, bytes]]
  revisions: dict[str, str]  # branch or tag -> commit
  refusal: tuple[int, str] | None = None  # status and X-Error-Code of files, as of a gated repository
  is_hidden: bool = False  # nothing is said of it without a login


class Hub(http.server.ThreadingHTTPServer):
  """Serves `repositories`, and remembers in `sent` which files it was asked for."""

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.repositories: dict[str, Repository] = {}
    self.sent: list[str] = []
    self.cut: set[str] = set()  # files that break off in the middle
    self.url = f'http://127.0.0.1:{self.server_port}'

  def add(self, name: str, files: dict[str, bytes], *, revision: str = 'main', **more) -> str:
    """Add a commit to a repository under this revision, and return its name."""
    commit = hashlib.sha1(json.dumps(sorted(files)).encode() + b''.join(files.values())).hexdigest()
    repository = self.repositories.setdefault(name, Repository({}, {}, **more))
    repository.commits[commit] = files
    repository.revisions[revision] = commit
    return commit


class Refused(Exception):
  """An answer other than 200: its status and the hub's code for it."""


class Handler(http.server.BaseHTTPRequestHandler):
  """What the hub answers to whoever has no login."""

  server: Hub
  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    try:
      self.answer(has_body=self.command == 'GET')
    except Refused as refused:
      status, code = refused.args
      self.send(status, b'', {'X-Error-Code': code})

  do_HEAD = do_GET

  def answer(self, *, has_body: bool):
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip('/').split('/')
    if path[:2] == ['api', 'models']:
      repository = self.repository('/'.join(path[2:4]), path[4] == 'tree')
      commit, files = self.commit(repository, path[5] if len(path) > 5 else 'main')
      listed = [{'rfilename': name} for name in files]
      tree = [{'type': 'file', 'path': name, 'size': len(x), 'oid': etag(x)} for name, x in files.items()]
      content = tree if path[4] == 'tree' else {'id': '/'.join(path[2:4]), 'sha': commit, 'siblings': listed}
      return self.send(200, json.dumps(content).encode(), {'Content-Type': 'application/json'})
    org, name, _, revision, *file = path
    repository = self.repository(f'{org}/{name}', is_file=True)
    commit, files = self.commit(repository, revision)
    name = '/'.join(file)
    if name not in files:
      raise Refused(404, 'EntryNotFound')
    if has_body:
      self.server.sent.append(name)
    is_cut = has_body and name in self.server.cut
    if is_cut and self.server.sent.count(name) > 1:
      raise Refused(400, 'Unavailable')
    headers = {'ETag': f'"{etag(files[name])}"', 'X-Repo-Commit': commit}
    return self.send(200, files[name] if has_body else b'', headers, size=len(files[name]), is_cut=is_cut)

  def repository(self, name: str, is_file: bool) -> Repository:
    repository = self.server.repositories.get(name)
    if repository is None or repository.is_hidden:
      raise Refused(401, 'RepoNotFound')  # as the hub answers whoever has no login
    if is_file and repository.refusal is not None:
      raise Refused(*repository.refusal)
    return repository

  def commit(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
    commit = repository.revisions.get(revision, revision)
    if commit not in repository.commits:
      raise Refused(404, 'RevisionNotFound')
    return commit, repository.commits[commit]

  def send(self, status: int, body: bytes, headers: dict[str, str], *, size: int | None = None, is_cut: bool = False):
    self.send_response(status)
    for name, value in (headers | {'Content-Length': str(len(body) if size is None else size)}).items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body[: len(body) // 2] if is_cut else body)
    self.close_connection = is_cut or self.close_connection

  def log_message(self, *_):
    """Say nothing on stderr."""


def etag(content: bytes) -> str:
  return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
  with Hub() as hub:
    thread = threading.Thread(target=hub.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
