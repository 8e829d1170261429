// A worker of a search, in C++. docs/other_languages.md says how to build it.
//
//   ./worker FOLDER/join.json [NAME]
//
// It takes tasks of the kind "cpp": texts "X Y [SECONDS]". The result is Rosenbrock's function of X and Y,
// after so many seconds, in which it reports how long it has run. SIGTERM: it leaves after its task.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

#include "courier/v1/courier.pb.h"
#include "search/v1/search.pb.h"

using namespace search::v1;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
struct Error : std::runtime_error { using runtime_error::runtime_error; };
struct Impostor : Error { using Error::Error; };  // a server without the secret: no reason to go on

std::string hmac(const std::string& key, const std::string& text) {
  unsigned char sum[32];
  HMAC(EVP_sha256(), key.data(), key.size(), (const unsigned char*)text.data(), text.size(), sum, nullptr);
  return std::string((char*)sum, 32);
}

class Server {  // The name server or a broker. It may be called from several threads.
 public:
  Server(const std::string& address, const std::string& secret) : secret_(secret) {
    grpc::ChannelArguments options;
    options.SetMaxReceiveMessageSize(-1);  // payloads have any size
    options.SetInt("grpc.enable_http_proxy", 0);
    options.SetInt("grpc.max_reconnect_backoff_ms", 1000);
    auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options);
    stub_ = std::make_unique<grpc::GenericStub>(channel);
  }

  template <class Reply, class Request>
  Reply ask(const std::string& path, const Request& request, double wait_s = 0) {
    std::string key, session;
    uint64_t number;
    {
      std::lock_guard<std::recursive_mutex> guard(lock_);
      if (session_.empty()) hello();
      key = key_, session = session_, number = ++number_;
    }
    std::string bytes = request.SerializeAsString();  // these are sealed, and these are sent
    grpc::ClientContext context;
    context.AddMetadata("courier-session-bin", session);
    context.AddMetadata("courier-sequence", std::to_string(number));
    context.AddMetadata("courier-seal-bin", seal(key, "request", path, number, bytes));
    std::string found = send(context, path, bytes, wait_s);
    auto& metadata = context.GetServerTrailingMetadata();
    auto it = metadata.find("courier-seal-bin");
    if (it == metadata.end() || std::string(it->second.data(), it->second.size()) != seal(key, "reply", path, number, found))
      throw Impostor("the reply is not that of the server");
    return parsed<Reply>(found);
  }

 private:
  void hello() {
    std::string nonce(32, 0);
    RAND_bytes((unsigned char*)nonce.data(), 32);
    courier::v1::HelloRequest request;
    request.set_nonce(nonce);
    grpc::ClientContext context;
    auto reply = parsed<courier::v1::HelloReply>(
        send(context, "/courier.v1.Courier/Hello", request.SerializeAsString(), 0));
    key_ = hmac(secret_, "courier.v1 session" + nonce + reply.nonce());
    if (hmac(key_, "courier.v1 server") != reply.proof()) throw Impostor("the secret is not that of the server");
    session_ = reply.session(), number_ = 0;
  }

  static std::string seal(const std::string& key, const std::string& direction, const std::string& path,
                          uint64_t number, const std::string& bytes) {
    std::string eight(8, 0), digest(32, 0);
    for (int i = 0; i < 8; i++) eight[7 - i] = char(number >> 8 * i);
    SHA256((const unsigned char*)bytes.data(), bytes.size(), (unsigned char*)digest.data());
    return hmac(key, "courier.v1 service " + direction + path + eight + digest);
  }

  std::string send(grpc::ClientContext& context, const std::string& path, const std::string& bytes, double wait_s) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(int(1000 * (wait_s + 10))));
    grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1), reply;
    std::promise<grpc::Status> ended;
    stub_->UnaryCall(&context, path, {}, &request, &reply, [&](grpc::Status status) { ended.set_value(status); });
    grpc::Status status = ended.get_future().get();
    if (status.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
      std::lock_guard<std::recursive_mutex> guard(lock_);
      session_.clear();  // it was started again, or has forgotten: the next call says hello
    }
    if (!status.ok()) throw Error(path + ": " + status.error_message());
    grpc::Slice whole;
    reply.DumpToSingleSlice(&whole);
    return std::string((const char*)whole.begin(), whole.size());
  }

  template <class M> static M parsed(const std::string& bytes) {
    M message;
    if (!message.ParseFromString(bytes)) throw Error("not a reply");
    return message;
  }

  std::unique_ptr<grpc::GenericStub> stub_;
  std::string secret_, key_, session_;
  uint64_t number_ = 0;
  std::recursive_mutex lock_;
};

std::atomic<bool> is_over{false}, is_stopped{false};
std::mutex mutex;  // of all below
std::shared_ptr<Server> broker;
std::string broker_name;
std::vector<Held> held;          // the task that runs
std::vector<Progress> progress;  // that no heartbeat has sent
std::vector<Outcome> outcomes;   // that are not handed in

void beat(Server& names, const Worker& me, double beat_s) {
  while (true) {
    std::this_thread::sleep_for(Seconds(beat_s));
    std::unique_lock<std::mutex> guard(mutex);
    PresenceRequest presence;
    *presence.mutable_worker() = me;
    presence.set_broker(broker_name);
    BeatRequest request;
    *request.mutable_worker() = me;
    for (auto& each : held) *request.add_held() = each;
    for (auto& each : outcomes) request.add_held()->set_id(each.id()), request.mutable_held()->rbegin()->set_token(each.token());
    for (auto& each : progress) *request.add_progress() = each;
    auto server = broker;
    guard.unlock();
    try {
      if (server) {
        auto reply = server->ask<BeatReply>("/search.v1.Broker/Beat", request);
        guard.lock();
        progress.erase(progress.begin(), progress.begin() + std::min<size_t>(progress.size(), request.progress_size()));
        for (auto& id : reply.stops()) if (!held.empty() && held[0].id() == id) is_stopped = true;
        guard.unlock();
      }
      auto seen = names.ask<PresenceReply>("/search.v1.NameServer/Beat", presence);
      if (seen.is_over()) is_over = true;
      RegisterRequest again;
      *again.mutable_worker() = me;
      if (!seen.is_known()) names.ask<RegisterReply>("/search.v1.NameServer/Register", again);
    } catch (const Error&) {  // the work goes on meanwhile; who asks for tasks notices what is lost
    }
  }
}

Outcome run(const Assignment& task) {
  auto began_at = Clock::now();
  auto passed_s = [&] { return Seconds(Clock::now() - began_at).count(); };
  Outcome outcome;
  outcome.set_id(task.id()), outcome.set_token(task.token());
  std::istringstream words(task.payload());
  double x, y, seconds = 0;
  if (words >> x >> y) {
    words >> seconds;
    for (int step = 0; passed_s() < seconds && !is_stopped; step++) {
      std::this_thread::sleep_for(Seconds(std::min(0.1, seconds)));
      std::lock_guard<std::mutex> guard(mutex);
      progress.emplace_back();
      progress.back().set_id(task.id()), progress.back().set_step(step), progress.back().set_value(passed_s());
    }
    outcome.set_state(is_stopped ? Outcome::STOPPED : Outcome::DONE);
    outcome.set_payload(std::to_string((1 - x) * (1 - x) + 100 * (y - x * x) * (y - x * x)));
  } else {
    outcome.set_state(Outcome::FAILED), outcome.set_text("the payload is not X Y [SECONDS]");
  }
  outcome.set_seconds(passed_s());
  return outcome;
}

int main(int count, char** arguments) try {
  if (count < 2) throw Error("usage: worker JOIN_FILE [NAME]");
  std::signal(SIGTERM, [](int) { is_over = true; });
  std::signal(SIGINT, [](int) { is_over = true; });
  std::stringstream text, life;
  text << std::ifstream(arguments[1]).rdbuf();
  google::protobuf::Struct info;
  if (!google::protobuf::util::JsonStringToMessage(text.str(), &info).ok()) throw Error("not a join.json");
  auto field = [&](const char* name) { return info.fields().at(name); };
  if (field("tls").has_struct_value()) throw Error("this example has no TLS");
  std::string digits = field("secret").string_value(), secret;
  for (size_t i = 0; i < digits.size(); i += 2) secret += char(std::stoi(digits.substr(i, 2), nullptr, 16));
  life << std::random_device()() << std::random_device()();
  RegisterRequest me;
  me.mutable_worker()->set_name(count > 2 ? arguments[2] : "cpp-" + std::to_string(getpid()));
  me.mutable_worker()->set_life(life.str());
  Server names(field("address").string_value(), secret);
  auto timing = names.ask<RegisterReply>("/search.v1.NameServer/Register", me);
  std::thread(beat, std::ref(names), me.worker(), timing.beat_s()).detach();
  auto heard_at = Clock::now();
  while (!is_over) {
    try {
      if (!broker) {
        PlaceRequest request;
        *request.mutable_worker() = me.worker();
        if (!broker_name.empty()) request.add_avoid(broker_name);
        auto place = names.ask<PlaceReply>("/search.v1.NameServer/Place", request);
        if (place.broker().empty()) throw Error("no broker is there");
        std::lock_guard<std::mutex> guard(mutex);
        broker = std::make_shared<Server>(place.address(), secret), broker_name = place.broker();
      }
      WorkRequest request;
      *request.mutable_worker() = me.worker();
      request.add_kinds("cpp"), request.set_count(1);
      request.set_wait_s(std::min(1.0, timing.poll_s()));  // so long a signal may wait
      for (auto& each : outcomes) *request.add_outcomes() = each;
      auto reply = broker->ask<WorkReply>("/search.v1.Broker/Work", request, request.wait_s());
      heard_at = Clock::now();
      if (reply.is_over()) is_over = true;
      std::unique_lock<std::mutex> guard(mutex);
      outcomes.clear();
      for (auto& task : reply.assignments()) {
        held.emplace_back(), held[0].set_id(task.id()), held[0].set_token(task.token());
        is_stopped = false;
        guard.unlock();
        auto outcome = run(task);
        guard.lock();
        held.clear(), outcomes.push_back(outcome);
      }
    } catch (const Impostor&) {
      throw;
    } catch (const Error& error) {  // another broker, or this one again; outcomes are kept
      if (Seconds(Clock::now() - heard_at).count() > 60) throw;
      { std::lock_guard<std::mutex> guard(mutex); broker.reset(); }
      std::this_thread::sleep_for(Seconds(0.2));
    }
  }
  LeaveRequest leave;
  *leave.mutable_worker() = me.worker();
  for (auto& each : outcomes) *leave.add_outcomes() = each;
  try { if (broker) broker->ask<LeaveReply>("/search.v1.Broker/Leave", leave); } catch (const Error&) {}
  leave.clear_outcomes();
  try { names.ask<LeaveReply>("/search.v1.NameServer/Leave", leave); } catch (const Error&) {}
  std::_Exit(0);  // the thread of heartbeats may be in a call
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << std::endl;
  std::_Exit(1);
}
